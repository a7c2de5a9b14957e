"""Detection data sets of other projects, image by image: COCO and LVIS, YOLO, ms-swift's grounding JSONL.

A reader yields ``LabeledImage``; ``write_*`` takes them. Boxes are pixel edges [x1, y1, x2, y2] of the upright image.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal

from rollmatch.errors import DataError

LARGEST = 1e9
"""No number of a label file is as large, in pixels or square pixels."""


class BadLabel(DataError):
    """A label file holds something that its format does not allow."""

    code = "label-invalid"


def are_numbers(values: object) -> bool:
    """Whether it is a list of finite numbers.

    >>> are_numbers([1, 2.5]), are_numbers([1, float("nan")]), are_numbers(["1"]), are_numbers(7)
    (True, False, False, False)
    """
    return isinstance(values, list) and all(map(_is_number, values))


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return False
    return -LARGEST < value < LARGEST


OnBad = Callable[[BadLabel], None]
"""What happens to an entry that cannot be read; where it returns, the entry is left out."""


def raise_bad(error: BadLabel) -> None:
    """Stop at the first bad entry."""
    raise error


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledObject:
    """One object of an image."""

    desc: str
    box: tuple[float, float, float, float]
    """[x1, y1, x2, y2] pixel edges; x2 may equal the image's width."""
    polygon: tuple[float, ...] = ()
    """[x, y, ...] pixels, where the object has one outline; empty: a box alone."""
    is_crowd: bool = False
    """A region of many objects, which nobody has separated (COCO's ``iscrowd``)."""
    area: float | None = None
    """Square pixels of the mask, where the source says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledImage:
    """One image with all its objects."""

    path: str
    width: int
    height: int
    objects: tuple[LabeledObject, ...]
    dropped: tuple[str, ...] = ()
    """Why each of the source's boxes that are no objects was left out."""


@dataclass(slots=True)
class Summary:
    """What a conversion read, wrote and dropped."""

    images: int = 0
    objects: int = 0
    crowds: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> number of objects or images that were left out."""
    without_box: dict[str, bool] = field(default_factory=dict)
    """Description -> whether none of its objects was written."""
    upright: int = 0
    """Images that were stored upright because their EXIF data turns them."""

    def lines(self) -> Iterator[str]:
        """The summary for people."""
        yield f"{self.images} images, {self.objects} objects, {self.crowds} crowd regions"
        if self.upright:
            yield f"{self.upright} images stored upright (their EXIF data turned them)"
        for reason, number in self.dropped.most_common():
            yield f"dropped: {number} x {reason}"
        empty = [desc for desc, is_empty in self.without_box.items() if is_empty]
        if empty:
            yield f"no valid box: {', '.join(empty)}"
