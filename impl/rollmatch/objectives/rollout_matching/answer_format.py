"""How an answer is written: the text around its list, the keys of an object, and what a coordinate is. Needs no torch.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from rollmatch.errors import ConfigError
from rollmatch.model.vocabulary import coord_token
from rollmatch.objectives.named import load_named
from rollmatch.records import NUM_BINS, Geometry, GroundTruth

LAST_BIN = NUM_BINS - 1


class AnswerFormatUnknown(ConfigError):
    """An answer format is one of the four by name, or a class that derives from ``AnswerFormat``."""

    code = "answer-format-unknown"


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
        xs, ys = truth.bins[0::2], truth.bins[1::2]
        return replace(truth, geometry=Geometry.BBOX, bins=(min(xs), min(ys), max(xs), max(ys)))

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
        if any(not 0 <= number <= top + self.in_pixels for number, top in zip(numbers, tops, strict=True)):
            return None
        return tuple(round(min(number, top) * LAST_BIN / top) for number, top in zip(numbers, tops, strict=True))


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


def load_answer_format(name: str, *, key: str) -> AnswerFormat:
    """One of the four, or what ``module:Class`` makes without arguments. Errors: ``AnswerFormatUnknown``."""
    if name in ANSWER_FORMATS:
        return ANSWER_FORMATS[name]
    made = load_named(name, key=key, kind="Class", refuse=AnswerFormatUnknown)
    made = made() if callable(made) else made
    if not isinstance(made, AnswerFormat):
        remedy = "Derive the class from rollmatch.AnswerFormat; it is made without arguments."
        raise AnswerFormatUnknown(f"{name} makes no AnswerFormat", key=key, remedy=remedy)
    return made
