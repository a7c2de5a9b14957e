"""How an answer is written, and which elements of its list are predictions. Needs no torch.

============  =============================================================================  ======================
name          an answer with one object                                                      coordinates
============  =============================================================================  ======================
coord_tokens  ``{"objects": [{"desc": "cat", "bbox_2d": ["<|coord_12|>", ...]}]}``           one token each, 0..999
integers      ``{"objects": [{"desc": "cat", "bbox_2d": [12, 40, 310, 505]}]}``              numbers 0..999
qwen3_vl      a fenced list: ``[{"bbox_2d": [12, 40, 310, 505], "label": "cat"}]``           numbers 0..1000
qwen2_5_vl    as ``qwen3_vl``                                                                pixels of the image as
                                                                                             the model gets it
============  =============================================================================  ======================

Data, matching and reports know bins 0..999 only; a format converts on reading and on writing. A format of your own is a
class that derives from ``AnswerFormat`` and is named as ``module:Class``. Source of the Qwen formats: the cookbooks of
Qwen2.5-VL and Qwen3-VL.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, Self

from rollmatch.data.geometry import box_around, twice_area
from rollmatch.model.vocabulary import coord_token
from rollmatch.records import NUM_BINS, Geometry, GroundTruth, PredictedObject

LAST_BIN = NUM_BINS - 1
MAX_DEPTH = 32
"""Levels of nesting an element may have."""
_COORD_LITERAL = re.compile(r"<\|coord_\d+\|>")


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """A list of objects in JSON. The defaults are those of ``coord_tokens``."""

    opening: str = '{"objects": ['
    """How an answer begins; all that is kept of a response in which nothing is parseable."""
    opening_marks: tuple[str, ...] = ("{", '"objects"', ":", "[")
    """What a response must begin with; JSON white space may stand between."""
    before_first: str = ""
    between: str = ", "
    after_last: str = ""
    closing: str = "]}"
    closing_marks: tuple[str, ...] = ("]", "}")
    desc_key: str = "desc"
    desc_first: bool = True
    """Whether the description stands before the shape."""
    geometries: tuple[Geometry, ...] = tuple(Geometry)
    """Shapes that an object may have; a polygon is written as the box around it where there is none."""
    largest: tuple[int, int] | None = None
    """Numbers that stand for bin 999 of the width and of the height; None: coordinates are single tokens."""
    in_pixels: bool = False
    """Whether numbers are pixels of the image as the model gets it: ``fitted`` must set ``largest``."""

    @property
    def uses_tokens(self) -> bool:
        """Whether a coordinate is one token of its own."""
        return self.largest is None

    def fitted(self, width: int, height: int) -> Self:
        """The format for an image of this size in pixels, as the model gets it."""
        return replace(self, largest=(max(1, width - 1), max(1, height - 1))) if self.in_pixels else self

    def shaped(self, truth: GroundTruth) -> GroundTruth:
        """The object in a shape that the format has.

        >>> leaf = GroundTruth(desc="leaf", geometry=Geometry.POLY, bins=(1, 2, 9, 2, 9, 8))
        >>> QWEN3_VL.shaped(leaf).bins, COORD_TOKENS.shaped(leaf).bins
        ((1, 2, 9, 8), (1, 2, 9, 2, 9, 8))
        """
        if truth.geometry in self.geometries:
            return truth
        return replace(truth, geometry=Geometry.BBOX, bins=box_around(truth.bins))

    def write(self, truth: GroundTruth) -> str:
        """One element of the list.

        >>> QWEN3_VL.write(GroundTruth(desc="cat", geometry=Geometry.BBOX, bins=(12, 40, 310, 999)))
        '{"bbox_2d": [12, 40, 310, 1000], "label": "cat"}'
        """
        literals = [self.literal(number) for number in self.numbers_of(truth.geometry, truth.bins)]
        desc, shape = (self.desc_key, truth.desc), (truth.geometry.value, literals)
        return json.dumps(dict([desc, shape] if self.desc_first else [shape, desc]), ensure_ascii=False)

    def desc_span(self, desc: str, written: str) -> tuple[int, int]:
        """Bytes of the description's content, between the quotes, in an element that ``write`` wrote.

        >>> COORD_TOKENS.desc_span("cat", '{"desc": "cat", "bbox_2d": []}')
        (10, 13)
        """
        key, content = json.dumps(self.desc_key, ensure_ascii=False), json.dumps(desc, ensure_ascii=False)[1:-1]
        head, _, _ = written.partition(f'{key}: "{content}"')
        start = len(f'{head}{key}: "'.encode())
        return start, start + len(content.encode())

    def join(self, written: Sequence[str], *, follows: bool) -> tuple[str, str]:
        """What stands before the first of these elements, and from there to the end of the answer.

        ``follows``: the list holds an element already.

        >>> COORD_TOKENS.join(["{}", "{}"], follows=True), COORD_TOKENS.join([], follows=True)
        ((', ', '{}, {}]}'), ('', ']}'))
        """
        before = (self.between if follows else self.before_first) if written else ""
        after = self.after_last if written or follows else ""
        return before, self.between.join(written) + after + self.closing

    def literal(self, number: int) -> str | int:
        """A coordinate as JSON holds it."""
        return coord_token(number) if self.uses_tokens else number

    def numbers_of(self, geometry: Geometry, bins: Sequence[int]) -> tuple[int, ...]:
        """The numbers that stand for these bins; those of a box keep at least 1 between left and right, top and bottom.

        >>> QWEN3_VL.numbers_of(Geometry.BBOX, (0, 500, 999, 501))
        (0, 501, 1000, 502)
        >>> QWEN2_5_VL.fitted(100, 100).numbers_of(Geometry.BBOX, (500, 998, 501, 999))
        (50, 98, 51, 99)
        """
        if self.largest is None or self.largest == (LAST_BIN, LAST_BIN):
            return tuple(bins)
        numbers = [round(k * self.largest[place % 2] / LAST_BIN) for place, k in enumerate(bins)]
        if geometry is Geometry.BBOX:
            for low in (0, 1):
                numbers[low] = min(numbers[low], self.largest[low] - 1)
                numbers[low + 2] = max(numbers[low + 2], numbers[low] + 1)
        return tuple(numbers)

    def bins_of(self, numbers: Sequence[int]) -> tuple[int, ...] | None:
        """The bins that these numbers stand for; None where one lies outside.

        A pixel may lie on the far edge of the image, one beyond its last one.

        >>> QWEN3_VL.bins_of((0, 501, 1000, 502)), QWEN3_VL.bins_of((0, 0, 1001, 5))
        ((0, 500, 999, 501), None)
        >>> QWEN2_5_VL.fitted(100, 100).bins_of((0, 50, 100, 99))
        (0, 505, 999, 999)
        """
        if self.largest is None:
            return tuple(numbers)
        tops = [self.largest[place % 2] for place in range(len(numbers))]
        if any(not 0 <= number <= top + self.in_pixels for number, top in zip(numbers, tops)):
            return None
        return tuple(round(min(number, top) * LAST_BIN / top) for number, top in zip(numbers, tops))


COORD_TOKENS = AnswerFormat()
INTEGERS = AnswerFormat(largest=(LAST_BIN, LAST_BIN))
QWEN3_VL = AnswerFormat(
    opening="```json\n[",
    opening_marks=("```json", "["),
    before_first="\n\t",
    between=",\n\t",
    after_last="\n",
    closing="]\n```",
    closing_marks=("]", "```"),
    desc_key="label",
    desc_first=False,
    geometries=(Geometry.BBOX,),
    largest=(1000, 1000),
)
QWEN2_5_VL = replace(QWEN3_VL, largest=(LAST_BIN, LAST_BIN), in_pixels=True)
ANSWER_FORMATS: Mapping[str, AnswerFormat] = {
    "coord_tokens": COORD_TOKENS,
    "integers": INTEGERS,
    "qwen3_vl": QWEN3_VL,
    "qwen2_5_vl": QWEN2_5_VL,
}


class JsonObject(NamedTuple):
    """A JSON object with its duplicate keys."""

    pairs: list[tuple[str, object]]


def is_too_deep(value: object) -> bool:
    """Whether a value has more than ``MAX_DEPTH`` levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return False
    return True


def _children(value: object) -> list[object]:
    if isinstance(value, JsonObject):
        return [child for _, child in value.pairs]
    return value if isinstance(value, list) else []


class DropReason(StrEnum):
    """Why something in a response is no prediction; of an element the first that applies, in this order."""

    NOT_AN_OBJECT = "not_an_object"
    DUPLICATE_KEY = "duplicate_key"
    UNEXPECTED_KEYS = "unexpected_keys"
    MISSING_DESC = "missing_desc"
    """Absent, no string, blank, or no text (half a surrogate pair)."""
    COORD_TOKEN_IN_DESC = "coord_token_in_desc"
    """The token, or its literal, which would become the token when written again."""
    MISSING_GEOMETRY = "missing_geometry"
    """Absent, or no list."""
    TWO_GEOMETRIES = "two_geometries"
    NESTED_GEOMETRY = "nested_geometry"
    WRONG_ARITY = "wrong_arity"
    """A box without exactly 4 values; a polygon with an odd number of them or fewer than 6."""
    NON_COORD_TOKEN = "non_coord_token"
    """A value that is not exactly one coordinate token between quotes."""
    NON_NUMBER = "non_number"
    """A value that is no whole number, where coordinates are numbers."""
    OUT_OF_RANGE = "out_of_range"
    """A number that lies outside the image."""
    BBOX_DEGENERATE = "bbox_degenerate"
    """x2 <= x1 or y2 <= y1."""
    POLY_DEGENERATE = "poly_degenerate"
    """Zero signed area."""
    MALFORMED = "malformed"
    TRAILING_TEXT = "trailing_text"


class Slot(NamedTuple):
    """A coordinate as it stands in a response."""

    start: int
    """First byte."""
    end: int
    """Byte after the last one."""
    position: int
    """Index of the token that holds the first byte."""
    number: int
    """Bin of a coordinate token, or the number as it is written."""


def judge(value: object, slots: tuple[Slot, ...], answer_format: AnswerFormat) -> PredictedObject | DropReason:
    """A prediction, or why an element is none; ``slots`` are all coordinates that stand in the element, in order."""
    if not isinstance(value, JsonObject):
        return DropReason.NOT_AN_OBJECT
    members = dict(value.pairs)
    if len(members) != len(value.pairs):
        return DropReason.DUPLICATE_KEY
    if not members.keys() <= {answer_format.desc_key, *answer_format.geometries}:
        return DropReason.UNEXPECTED_KEYS
    desc = members.get(answer_format.desc_key)
    if not isinstance(desc, str) or not desc.strip() or any("\ud800" <= character <= "\udfff" for character in desc):
        return DropReason.MISSING_DESC
    if _COORD_LITERAL.search(desc):
        return DropReason.COORD_TOKEN_IN_DESC
    geometries = [geometry for geometry in answer_format.geometries if geometry in members]
    if len(geometries) == 2:
        return DropReason.TWO_GEOMETRIES
    values = members[geometries[0]] if geometries else None
    if not isinstance(values, list):
        return DropReason.MISSING_GEOMETRY
    reason = _flaw_of(geometries[0], values, slots, answer_format)
    bins = answer_format.bins_of([slot.number for slot in slots])
    if reason or bins is None:
        return reason or DropReason.OUT_OF_RANGE
    return PredictedObject(
        desc=desc,
        geometry=geometries[0],
        bins=bins,
        positions=tuple(slot.position for slot in slots),
        spans=tuple((slot.start, slot.end) for slot in slots),
    )


def _flaw_of(
    geometry: Geometry, values: list[object], slots: tuple[Slot, ...], answer_format: AnswerFormat
) -> DropReason | None:
    """No coordinate stands outside the geometry once keys and description are judged, so order decides the rest."""
    if any(isinstance(value, list) for value in values):
        return DropReason.NESTED_GEOMETRY
    if len(values) != 4 if geometry is Geometry.BBOX else len(values) < 6 or len(values) % 2:
        return DropReason.WRONG_ARITY
    numbers = [slot.number for slot in slots]
    is_written = values == [answer_format.literal(number) for number in numbers]
    if not is_written or any(isinstance(value, (bool, float)) for value in values):  # 1.0 and true are equal to 1
        return DropReason.NON_COORD_TOKEN if answer_format.uses_tokens else DropReason.NON_NUMBER
    if geometry is Geometry.BBOX:
        return DropReason.BBOX_DEGENERATE if numbers[2] <= numbers[0] or numbers[3] <= numbers[1] else None
    return None if twice_area(numbers) else DropReason.POLY_DEGENERATE
