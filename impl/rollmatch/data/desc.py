"""Rules of a description: it must come back from its tokens as it was."""

import re
import unicodedata
from collections.abc import Iterator

from rollmatch.errors import DataError

_REFUSED_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")


def check_desc(desc: object, *, key: str, place: str) -> Iterator[DataError]:
    """Broken rules of one description; ``place`` says where in the record it stands."""
    if not isinstance(desc, str) or not desc.strip():
        problem = f"{place}: desc must be a text that is not empty, but is {desc!r}"
        yield DataError(problem, code="desc-empty", key=key, remedy="Describe the object, or remove it.")
        return
    if any(unicodedata.category(character) in _REFUSED_CATEGORIES for character in desc):
        problem = f"{place}: desc {desc!r} holds a line break, a tab or another control character"
        yield DataError(problem, code="desc-control-character", key=key, remedy="Remove it.")
    if desc != desc.strip() or re.search(r"\s\s", desc):
        problem = f"{place}: desc {desc!r} has white space at an end or twice in a row"
        yield DataError(problem, code="desc-spacing", key=key, remedy="Keep single spaces between words.")
    if (token := re.search(r"<\|.*?\|>", desc)) is not None:
        problem = f"{place}: desc {desc!r} holds {token.group()}, which would become a special token"
        yield DataError(problem, code="desc-special-token", key=key, remedy="Write it in other words.")
