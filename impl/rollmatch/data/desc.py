"""Rules of a description: it must come back from its tokens as it was."""

import re
import unicodedata
from collections.abc import Iterator

from rollmatch.errors import DataError


class DescEmpty(DataError):
    """A description is not a text, or an empty one."""

    code = "desc-empty"


class DescControlCharacter(DataError):
    """A description holds a line break, a tab, another control character or half a surrogate pair."""

    code = "desc-control-character"


class DescSpacing(DataError):
    """A description begins or ends with a space, or holds two in a row."""

    code = "desc-spacing"


class DescSpecialToken(DataError):
    """A description holds the literal of a special token, ``<|...|>``."""

    code = "desc-special-token"


_REFUSED_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")


def check_desc(desc: object, *, key: str, place: str) -> Iterator[DataError]:
    """Broken rules of one description; ``place`` says where in the record it stands."""
    if not isinstance(desc, str) or not desc.strip():
        problem = f"{place}: desc must be a text that is not empty, but is {desc!r}"
        yield DescEmpty(problem, key=key, remedy="Describe the object, or remove it.")
        return
    if any(unicodedata.category(character) in _REFUSED_CATEGORIES for character in desc):
        problem = f"{place}: desc {desc!r} holds a line break, a tab or another control character"
        yield DescControlCharacter(problem, key=key, remedy="Remove it.")
    if desc != desc.strip() or re.search(r"\s\s", desc):
        problem = f"{place}: desc {desc!r} has white space at an end or twice in a row"
        yield DescSpacing(problem, key=key, remedy="Keep single spaces between words.")
    if (token := re.search(r"<\|.*?\|>", desc)) is not None:
        problem = f"{place}: desc {desc!r} holds {token.group()}, which would become a special token"
        yield DescSpecialToken(problem, key=key, remedy="Write it in other words.")
