"""The elements of an answer's list: judge one that was read, write those that were missed. Needs no torch.

The tail that is written (missed objects, closing, stop token) is tokenised alone, so it never merges with the prefix:
the rollout's own ids stay as sampled. It begins with the cut head, the kept bytes of a token that the cut fell into.
Tokenised together with what follows, they make the token that the model would use by itself: where it wrote ``"]}]}``
too early, the label in that very place is ``"]}, {"``. Without that, continuing or closing would never be taught.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, NamedTuple

from rollmatch.errors import TargetError
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.rollout_matching.answer_format import COORD_TOKENS, AnswerFormat
from rollmatch.records import Geometry, GroundTruth, ParsedRollout, PredictedObject

MAX_DEPTH = 32
"""Levels of nesting an element may have."""
_COORD_LITERAL = re.compile(r"<\|coord_\d+\|>")


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


def judge(value: Any, slots: tuple[Slot, ...], answer_format: AnswerFormat) -> PredictedObject | DropReason:
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
    geometry: Geometry, values: list[Any], slots: tuple[Slot, ...], answer_format: AnswerFormat
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
    return None if _twice_area(numbers) else DropReason.POLY_DEGENERATE


def _twice_area(numbers: Sequence[int]) -> int:
    """Twice the signed area (shoelace) of x y x y ...

    >>> _twice_area([0, 0, 4, 0, 4, 3, 0, 3]), _twice_area([0, 0, 1, 1, 2, 2])
    (24, 0)
    """
    xs, ys = numbers[0::2], numbers[1::2]
    next_xs, next_ys = [*xs[1:], xs[0]], [*ys[1:], ys[0]]
    return sum(x * next_y - next_x * y for x, y, next_x, next_y in zip(xs, ys, next_xs, next_ys, strict=True))


class DescHoldsAddedToken(TargetError):
    """A description must not spell an added token: it would stop the answer, or claim a coordinate."""

    code = "desc-holds-added-token"


class CutHeadNotEncodable(TargetError):
    """A tail's tokens decode to exactly its text, the cut head included."""

    code = "cut-head-not-encodable"


class DescChangedByTokenizer(TargetError):
    """A description must come out of the tokenizer as it went in (a normalizer may rewrite it)."""

    code = "desc-changed-by-tokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What follows the prefix. Made by ``append_missed``, used by ``rollout_matching``."""

    token_ids: tuple[int, ...]
    """[N] cut head and text, tokenised together and alone, then the stop token."""
    text: str
    """What is appended to the prefix text; without cut head and stop token."""
    desc_positions: tuple[int, ...]
    """Indices into ``token_ids`` of tokens that hold any byte of a description's content, ascending."""


def serialize_objects(objects: Iterable[GroundTruth], answer_format: AnswerFormat = COORD_TOKENS) -> str:
    """The whole answer for these objects.

    >>> from rollmatch.records import Geometry
    >>> print(serialize_objects([GroundTruth(desc="leaf", geometry=Geometry.POLY, bins=(1, 2, 9, 2, 9, 8))]))
    ... # doctest: +ELLIPSIS
    {"objects": [{"desc": "leaf", "poly": ["<|coord_1|>", "<|coord_2|>", ... "<|coord_8|>"]}]}
    """
    written = [answer_format.write(answer_format.shaped(each)) for each in objects]
    return answer_format.opening + "".join(answer_format.join(written, follows=False))


def append_missed(
    parsed: ParsedRollout,
    missed: Sequence[GroundTruth],
    vocabulary: Vocabulary,
    answer_format: AnswerFormat = COORD_TOKENS,
) -> Tail:
    """The tail that completes a prefix: a comma if needed, the missed objects in order, the closing, the stop token.

    Errors: ``DescHoldsAddedToken``, ``DescChangedByTokenizer`` (``key`` is ``missed[index].desc``),
    ``CutHeadNotEncodable``.
    """
    check_descs(missed, vocabulary)
    parts = [answer_format.write(answer_format.shaped(each)) for each in missed]
    before, after = answer_format.join(parts, follows=parsed.num_elements > 0)
    token_ids = _encode(parsed.cut_head + (before + after).encode(), vocabulary)
    within = [answer_format.desc_span(each.desc, part) for each, part in zip(missed, parts, strict=True)]
    lens = [len((part + answer_format.between).encode()) for part in parts]
    firsts = accumulate(lens, initial=len(parsed.cut_head) + len(before.encode()))
    spans = [(first + start, first + end) for first, (start, end) in zip(firsts, within, strict=False)]
    starts = list(accumulate((len(vocabulary.piece(token_id)) for token_id in token_ids), initial=0))
    return Tail(
        token_ids=(*token_ids, vocabulary.stop_id),
        text=before + after,
        desc_positions=tuple(tokens_in(spans, starts)),
    )


def _encode(raw: bytes, vocabulary: Vocabulary) -> tuple[int, ...]:
    token_ids = vocabulary.encode_bytes(raw)
    if vocabulary.decode(token_ids) != raw:
        raise CutHeadNotEncodable(
            f"{raw!r} is tokenised as {vocabulary.decode(token_ids)!r}",
            key="cut_head",
            remedy="Use a tokenizer whose normalizer leaves such text alone.",
        )
    return token_ids


def check_descs(objects: Sequence[GroundTruth], vocabulary: Vocabulary) -> None:
    """Raise ``DescHoldsAddedToken`` or ``DescChangedByTokenizer``; ``key`` is ``missed[index].desc``."""
    for index, each in enumerate(objects):
        quoted = json.dumps(each.desc, ensure_ascii=False)
        token_ids = vocabulary.encode(quoted)
        key = f"missed[{index}].desc"
        for token_id in token_ids:
            if token_id in vocabulary.control_ids or vocabulary.bin_of(token_id) is not None:
                raise DescHoldsAddedToken(
                    f"{quoted} holds the added token {vocabulary.text([token_id])}",
                    key=key,
                    remedy="Take the literal out of the description.",
                )
        if vocabulary.decode(token_ids) != quoted.encode():
            raise DescChangedByTokenizer(
                f"{quoted} is tokenised as {vocabulary.text(token_ids)}",
                key=key,
                remedy="Store the description as the tokenizer writes it (Qwen: Unicode NFC).",
            )


def tokens_in(spans: Iterable[tuple[int, int]], starts: Sequence[int]) -> list[int]:
    """Tokens that share a byte with a span, ascending; ``starts`` are the tokens' first bytes and the whole length.

    Tokens of 3, 2 and 4 bytes; bytes 4 and 5 lie in the second and the third:

    >>> tokens_in([(4, 6)], [0, 3, 5, 9])
    [1, 2]
    >>> tokens_in([(0, 3), (3, 5)], [0, 3, 5, 9])
    [0, 1]
    """
    touched = (range(bisect_right(starts, low) - 1, bisect_left(starts, high)) for low, high in spans)
    return sorted({token for tokens in touched for token in tokens})
