"""What the response should have gone on with: the missed objects, the closing, the stop token.

The tail is tokenised alone, so it never merges with the prefix: the rollout's own ids stay what they are. It begins
with the cut head, the kept bytes of a token that the cut fell into. Tokenised together with what follows, they make
the token that the model would use by itself: where it wrote ``"]}]}`` too early, the label in that very place is
``"]}, {"``. Without that, the decision to go on or to close would never be taught.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rollmatch.errors import TargetError
from rollmatch.model.vocabulary import Vocabulary, coord_token
from rollmatch.objectives.rollout_matching.parse import OPENING
from rollmatch.records import GroundTruth, ParsedRollout

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
    """What follows the prefix. Made by ``append_missed``, eaten by ``rollout_matching``."""

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
    """The tail that completes a prefix: a comma if an element stands before, the missed objects in order, the closing.

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
