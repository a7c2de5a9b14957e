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
from rollmatch.model.vocabulary import Vocabulary, coord_token
from rollmatch.records import Geometry, GroundTruth, ParsedRollout, PredictedObject

OPENING = '{"objects": ['
"""How an answer begins; the prefix of a response in which nothing is parseable."""

_COORD_LITERAL = re.compile(r"<\|coord_\d+\|>")


class JsonObject(NamedTuple):
    """A JSON object with its duplicate keys."""

    pairs: list[tuple[str, Any]]


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
    BBOX_DEGENERATE = "bbox_degenerate"
    """x2 <= x1 or y2 <= y1."""
    POLY_DEGENERATE = "poly_degenerate"
    """Zero signed area."""
    MALFORMED = "malformed"
    TRAILING_TEXT = "trailing_text"


class Slot(NamedTuple):
    byte: int
    position: int
    coord_bin: int


def judge(value: Any, slots: tuple[Slot, ...]) -> PredictedObject | DropReason:
    if not isinstance(value, JsonObject):
        return DropReason.NOT_AN_OBJECT
    members = dict(value.pairs)
    if len(members) != len(value.pairs):
        return DropReason.DUPLICATE_KEY
    if not members.keys() <= {"desc", *Geometry}:
        return DropReason.UNEXPECTED_KEYS
    desc = members.get("desc")
    if not isinstance(desc, str) or not desc.strip() or any("\ud800" <= character <= "\udfff" for character in desc):
        return DropReason.MISSING_DESC
    if _COORD_LITERAL.search(desc):
        return DropReason.COORD_TOKEN_IN_DESC
    geometries = [geometry for geometry in Geometry if geometry in members]
    if len(geometries) == 2:
        return DropReason.TWO_GEOMETRIES
    values = members[geometries[0]] if geometries else None
    if not isinstance(values, list):
        return DropReason.MISSING_GEOMETRY
    reason = _flaw_of(geometries[0], values, slots)
    bins, positions = tuple(slot.coord_bin for slot in slots), tuple(slot.position for slot in slots)
    return reason or PredictedObject(desc=desc, geometry=geometries[0], bins=bins, positions=positions)


def _flaw_of(geometry: Geometry, values: list[Any], slots: tuple[Slot, ...]) -> DropReason | None:
    """No coordinate token stands outside the geometry once keys and desc are judged, so order decides the rest."""
    if any(isinstance(value, list) for value in values):
        return DropReason.NESTED_GEOMETRY
    if len(values) != 4 if geometry is Geometry.BBOX else len(values) < 6 or len(values) % 2:
        return DropReason.WRONG_ARITY
    bins = [slot.coord_bin for slot in slots]
    if values != [coord_token(coord_bin) for coord_bin in bins]:
        return DropReason.NON_COORD_TOKEN
    if geometry is Geometry.BBOX:
        return DropReason.BBOX_DEGENERATE if bins[2] <= bins[0] or bins[3] <= bins[1] else None
    return None if _twice_area(bins) else DropReason.POLY_DEGENERATE


def _twice_area(bins: Sequence[int]) -> int:
    """Twice the signed area (shoelace) of x y x y ...

    >>> _twice_area([0, 0, 4, 0, 4, 3, 0, 3]), _twice_area([0, 0, 1, 1, 2, 2])
    (24, 0)
    """
    xs, ys = bins[0::2], bins[1::2]
    next_xs, next_ys = [*xs[1:], xs[0]], [*ys[1:], ys[0]]
    return sum(x * next_y - next_x * y for x, y, next_x, next_y in zip(xs, ys, next_xs, next_ys, strict=True))


CLOSING = "]}"


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


def serialize_objects(objects: Iterable[GroundTruth]) -> str:
    """The whole answer for these objects, on one line.

    >>> from rollmatch.records import Geometry
    >>> print(serialize_objects([GroundTruth(desc="leaf", geometry=Geometry.POLY, bins=(1, 2, 9, 2, 9, 8))]))
    ... # doctest: +ELLIPSIS
    {"objects": [{"desc": "leaf", "poly": ["<|coord_1|>", "<|coord_2|>", ... "<|coord_8|>"]}]}
    """
    return OPENING + ", ".join(_serialize(each) for each in objects) + CLOSING


def append_missed(parsed: ParsedRollout, missed: Sequence[GroundTruth], vocabulary: Vocabulary) -> Tail:
    """The tail that completes a prefix: a comma if needed, the missed objects in order, the closing, the stop token.

    Errors: ``DescHoldsAddedToken``, ``DescChangedByTokenizer`` (``key`` is ``missed[index].desc``),
    ``CutHeadNotEncodable``.
    """
    comma = ", " if missed and parsed.num_elements else ""
    parts = [_serialize(each) for each in missed]
    text = comma + ", ".join(parts) + CLOSING
    _check_descs(missed, vocabulary)
    token_ids = _encode(parsed.cut_head + text.encode(), vocabulary)
    spans = _desc_spans(missed, parts, first=len(parsed.cut_head) + len(comma))
    return Tail(
        token_ids=(*token_ids, vocabulary.stop_id),
        text=text,
        desc_positions=_overlapping([len(vocabulary.piece(token_id)) for token_id in token_ids], spans),
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


def _serialize(each: GroundTruth) -> str:
    values = {"desc": each.desc, each.geometry.value: [coord_token(k) for k in each.bins]}
    return json.dumps(values, ensure_ascii=False)


def _check_descs(missed: Sequence[GroundTruth], vocabulary: Vocabulary) -> None:
    for index, each in enumerate(missed):
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


def _desc_spans(missed: Sequence[GroundTruth], parts: Sequence[str], *, first: int) -> list[tuple[int, int]]:
    """Byte spans of the descriptions' content (between the quotes) in a tail whose first object starts at ``first``."""
    spans, start = [], first
    for each, part in zip(missed, parts, strict=True):
        content = json.dumps(each.desc, ensure_ascii=False)[1:-1].encode()
        opened = start + len('{"desc": "')
        spans.append((opened, opened + len(content)))
        start += len(part.encode()) + len(", ")
    return spans


def _overlapping(piece_lens: Sequence[int], spans: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Indices of pieces that share a byte with a span; spans ascend.

    Pieces of 3, 2 and 4 bytes start at 0, 3 and 5; bytes 4 and 5 lie in the second and the third:

    >>> _overlapping([3, 2, 4], [(4, 6)])
    (1, 2)
    >>> _overlapping([3, 2, 4], [(0, 3), (3, 5)])
    (0, 1)
    """
    starts = list(accumulate(piece_lens, initial=0))
    touched = (range(bisect_right(starts, low) - 1, bisect_left(starts, high)) for low, high in spans)
    return tuple(sorted({index for indices in touched for index in indices}))
