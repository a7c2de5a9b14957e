"""Where a record stands, and what its fields are checked by."""

import os
from dataclasses import dataclass
from pathlib import Path

from rollmatch.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a record stands. Made by ``load_samples``."""

    sample_id: int
    key: str
    """``file:line``."""
    image_root: Path
    system: str = ""
    """The system message in front of a bare prompt; empty leaves it out."""
    answered: bool = False
    """Whether a chat ends with the answer."""


def image_path(image: str, image_root: Path) -> str:
    """The absolute path of an image; ``sub/..`` is another directory where ``sub`` is a link."""
    path = os.path.join(image_root, image)
    return os.path.realpath(path) if ".." in path.split(os.sep) else os.path.abspath(path)  # by far the faster one


def is_side(value: object) -> bool:
    """Whether a value is a width or a height."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def wrong_type(name: str, wanted: str, value: object, key: str) -> DataError:
    """The error about a field of another type."""
    return DataError(
        f"{name} must be {wanted}, but is {value!r}", code="field-type", key=key, remedy="Correct the value."
    )
