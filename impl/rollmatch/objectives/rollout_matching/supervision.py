"""What each token of a segment is to teach: a text label, a coordinate bin, or nothing. Needs no torch.

With P = ``prompt_len``, X = ``prefix_len``, L = ``encoded_len``:

==================  ==========================================================================
``[0, P)``          prompt: nothing
``[P, P + X)``      the rollout's own words: nothing, but slots of matched objects learn the true bin, and tokens of
                    their numbers, and of their descriptions with ``desc_ce_weight_matched``, the true token
                    (``label_corrections``)
``[P + X, L)``      appended tail: coordinate tokens learn their own bin; every other token its own id,
                    with weight 1, or ``desc_ce_weight`` inside a description; closing and EOS included
==================  ==========================================================================

A coordinate token never gets a text label, wherever it stands. Source: the rollout-matching objective
(prefix slots and tail supervised, everything else context).

Matched numbers and descriptions of several tokens are corrected: each place gets the token that it should have held.
A wrong digit makes what follows it meaningless: behind the 4 of ``145`` no digit says anything about a true ``137``. So
a text is supervised from its first token up to and including the first one where it leaves the true text, and not
behind it. With ``y`` the sampled tokens from the text's first one, and ``u`` the tokens of the true text in its place,
up to the end of the token that holds the delimiter::

    m        = the first k with y[k] != u[k], or the last k where there is none
    label[k] = u[k]          for k <= m
    label[k] = unsupervised  for k > m

The delimiter counts: a number that ends too early leaves the true one there.

===========  ===========  ======================
sampled      true         labels
===========  ===========  ======================
``145,``     ``137,``     ``1 3``, then none
``13,``      ``137,``     ``1 3 7``
``1375,``    ``137,``     ``1 3 7 ,``, then none
``137,``     ``137,``     ``1 3 7 ,``
``sixty"``   ``six"``     ``six "``, then none
===========  ===========  ======================
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from rollmatch.errors import LearnError
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.records import NUM_BINS, Segment, Supervision

BinOf = Callable[[int], int | None]
"""Token id -> bin of a coordinate token, None for any other (``Vocabulary.bin_of``)."""
IGNORED = -100
"""Label of a position without text supervision, as torch's cross-entropy reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRules:
    """What is learnt as text, and with what weight."""

    desc_ce_weight: float = 1.0
    """Weight of tokens of the tail that overlap a description; 0 leaves them out."""
    desc_ce_weight_matched: float = 0.0
    """Weight of corrected tokens of descriptions; 0 leaves them out."""


def mask_segment(segment: Segment, *, rules: MaskRules, bin_of: BinOf) -> Supervision:
    """What one segment is to learn; positions index ``segment.token_ids``.

    Errors: ``LearnError`` for lengths and positions that do not fit; ``key`` is the sample's origin.

    Prompt 7 7, prefix ``(`` slot 22 ``)``, tail ``a`` 25 EOS; 20..29 are coordinates, bin = id - 20:

    >>> from rollmatch.records import Sample
    >>> sample = Sample(sample_id=0, origin="x:1", images=(), objects=(), width=8, height=8)
    >>> segment = Segment(sample=sample, policy_version=1, token_ids=(7, 7, 1, 22, 2, 3, 25, 9), prompt_len=2,
    ...                   prefix_len=3, coord_positions=(3,), coord_bins=(4,))
    >>> s = mask_segment(segment, rules=MaskRules(), bin_of=lambda i: i - 20 if 20 <= i < 30 else None)
    >>> s.labels
    (-100, -100, -100, -100, -100, 3, -100, 9)
    >>> s.coord_positions, s.coord_bins
    ((3, 6), (4, 5))
    """
    _check_lens(segment)
    _check_positions(segment)
    _check_slots(segment, bin_of)
    tail_start = segment.prompt_len + segment.prefix_len
    tail_bins = [(index, bin_of(segment.token_ids[index])) for index in range(tail_start, segment.encoded_len)]
    tail_slots = [(index, coord_bin) for index, coord_bin in tail_bins if coord_bin is not None]
    weights = _text_weights(segment, (index for index, coord_bin in tail_bins if coord_bin is None), rules)
    labels = [i if weight else IGNORED for i, weight in zip(segment.token_ids, weights)]
    desc = frozenset(segment.desc_positions)
    for index, label in zip(segment.corrected_positions, segment.corrected_labels):
        weight = rules.desc_ce_weight_matched if index in desc else 1.0
        weights[index] = weight if label != IGNORED else 0.0
        labels[index] = label if weight else IGNORED
    return Supervision(
        labels=tuple(labels),
        weights=tuple(weights),
        coord_positions=(*segment.coord_positions, *(index for index, _ in tail_slots)),
        coord_bins=(*segment.coord_bins, *(coord_bin for _, coord_bin in tail_slots)),
    )


def mask_segments(
    segments: Iterable[Segment], *, starts: Iterable[int], num_tokens: int, rules: MaskRules, bin_of: BinOf
) -> Supervision:
    """What a list of ``num_tokens`` tokens is to learn in which segment i starts at ``starts[i]``: row or padded batch.

    Position 0 of a segment is prompt and so has no label: no segment is ever scored on the last logit of
    the one before it. Errors: as ``mask_segment``.
    """
    masks = [mask_segment(segment, rules=rules, bin_of=bin_of) for segment in segments]
    return place_supervisions(masks, starts=starts, num_tokens=num_tokens)


def place_supervisions(supervisions: Iterable[Supervision], *, starts: Iterable[int], num_tokens: int) -> Supervision:
    """Lay several supervisions into one list of ``num_tokens`` tokens; gaps teach nothing.

    Segments that share a prompt overlap, before what they teach.

    >>> one = Supervision(labels=(-100, 5), weights=(0.0, 1.0), coord_positions=(1,), coord_bins=(8,))
    >>> both = place_supervisions([one, one], starts=[0, 3], num_tokens=5)
    >>> both.labels, both.coord_positions
    ((-100, 5, -100, -100, 5), (1, 4))
    """
    labels, weights = [IGNORED] * num_tokens, [0.0] * num_tokens
    slots: list[tuple[int, int]] = []
    for part, start in zip(supervisions, starts):
        for place, (label, weight) in enumerate(zip(part.labels, part.weights, strict=True), start):
            if label != IGNORED:
                labels[place], weights[place] = label, weight
        moved = (start + position for position in part.coord_positions)
        slots += zip(moved, part.coord_bins)
    return Supervision(
        labels=tuple(labels),
        weights=tuple(weights),
        coord_positions=tuple(position for position, _ in slots),
        coord_bins=tuple(coord_bin for _, coord_bin in slots),
    )


def _text_weights(segment: Segment, text_positions: Iterable[int], rules: MaskRules) -> list[float]:
    desc = frozenset(segment.desc_positions)
    weights = [0.0] * segment.encoded_len
    for index in text_positions:
        weights[index] = rules.desc_ce_weight if index in desc else 1.0
    return weights


def _check_lens(segment: Segment) -> None:
    origin = segment.sample.origin
    if not 1 <= segment.prompt_len < segment.encoded_len:
        problem = f"prompt_len {segment.prompt_len} of {segment.encoded_len} tokens, of which one at least is a target"
        raise LearnError(problem, code="prompt-len-out-of-range", key=origin)
    if not 0 <= segment.prefix_len <= segment.train_len:
        problem = f"prefix_len {segment.prefix_len} of {segment.train_len} target tokens"
        raise LearnError(problem, code="segment-lens-disagree", key=origin)
    if len(segment.coord_positions) != len(segment.coord_bins):
        problem = f"{len(segment.coord_positions)} slots but {len(segment.coord_bins)} bins"
        raise LearnError(problem, code="segment-lens-disagree", key=origin)
    if len(segment.corrected_positions) != len(segment.corrected_labels):
        problem = f"{len(segment.corrected_positions)} corrected tokens but {len(segment.corrected_labels)} labels"
        raise LearnError(problem, code="segment-lens-disagree", key=origin)


def _check_positions(segment: Segment) -> None:
    origin, tail_start = segment.sample.origin, segment.prompt_len + segment.prefix_len
    for positions in (segment.coord_positions, segment.desc_positions, segment.corrected_positions):
        outside = [index for index in positions if not segment.prompt_len <= index < segment.encoded_len]
        if outside:
            problem = f"index {outside[0]} is not in the target [{segment.prompt_len}, {segment.encoded_len})"
            raise LearnError(problem, code="supervision-outside-target", key=origin)
        if any(before >= after for before, after in pairwise(positions)):
            problem = f"positions {positions} do not ascend without repeats"
            raise LearnError(problem, code="positions-not-ascending", key=origin)
    if any(index >= tail_start for index in segment.coord_positions):
        slot = segment.coord_positions[-1]
        raise LearnError(f"slot {slot} lies in the tail from {tail_start}", code="slot-outside-prefix", key=origin)
    before = [index for index in segment.desc_positions if index < tail_start]
    if not set(before) <= set(segment.corrected_positions):
        misplaced = f"description token {before[0]} lies before the tail from {tail_start}, and is not corrected"
        raise LearnError(misplaced, code="desc-outside-tail", key=origin)


def _check_slots(segment: Segment, bin_of: BinOf) -> None:
    origin = segment.sample.origin
    for index, coord_bin in zip(segment.coord_positions, segment.coord_bins):
        if bin_of(segment.token_ids[index]) is None:
            problem = f"token {segment.token_ids[index]} of slot {index} is no coordinate"
            raise LearnError(problem, code="slot-holds-no-coord", key=origin)
        if not 0 <= coord_bin < NUM_BINS:
            problem = f"bin {coord_bin} of slot {index} is none of {NUM_BINS}"
            raise LearnError(problem, code="slot-bin-out-of-range", key=origin)


class Correction(NamedTuple):
    """Where a number or a description stands in a target, and what it should have been."""

    start: int
    """First byte."""
    end: int
    """Byte after the last one: the delimiter's first."""
    text: str
    is_desc: bool = False


class CorrectedToken(NamedTuple):
    """One token of a corrected text."""

    position: int
    """Index into the target's ids."""
    label: int
    """The token that should have stood there, or -100."""
    is_desc: bool


def label_corrections(
    target_ids: Sequence[int], corrections: Sequence[Correction], vocabulary: Vocabulary
) -> list[CorrectedToken]:
    """The tokens of these texts, ascending, as the texts are.

    ``target_ids`` are prefix and tail: where the delimiter's token is cut off the prefix, the tail holds it.
    """
    pieces = [vocabulary.piece(token_id) for token_id in target_ids]
    starts = list(accumulate(map(len, pieces), initial=0))
    text = b"".join(pieces)
    found: dict[int, CorrectedToken] = {}
    for start, end, wanted, is_desc in corrections:
        first = bisect_right(starts, start) - 1
        if first in found and found[first].label != target_ids[first]:
            continue  # the text before has left its truth in this very token
        after = _token_border(starts, end, text)
        true_text = text[starts[first] : start] + wanted.encode() + text[end : starts[after]]
        labels = _labels_of(target_ids[first:after], vocabulary.encode_bytes(true_text), first=first)
        found |= {position: CorrectedToken(position, label, is_desc) for position, label in labels.items()}
    return [found[position] for position in sorted(found)]


def _labels_of(sampled: Sequence[int], true: Sequence[int], *, first: int) -> dict[int, int]:
    """The rule at the top of this file, for one text whose first token is the target's ``first``.

    >>> _labels_of([1, 4, 5, 0], [1, 3, 7, 0], first=20)
    {20: 1, 21: 3, 22: -100, 23: -100}
    >>> _labels_of([1, 3, 0], [1, 3, 7, 0], first=20)
    {20: 1, 21: 3, 22: 7}
    >>> _labels_of([1, 3, 7, 5, 0], [1, 3, 7, 0], first=20)
    {20: 1, 21: 3, 22: 7, 23: 0, 24: -100}
    """
    pairs = zip(sampled, true)
    leaves = next((place for place, (mine, wanted) in enumerate(pairs) if mine != wanted), len(true))
    return {first + place: true[place] if place <= leaves else IGNORED for place in range(len(sampled))}


def _token_border(starts: Sequence[int], byte: int, text: bytes) -> int:
    """The first token behind the one that holds ``byte`` that does not begin in mid-character.

    With tokens of 3, 1 and 2 bytes, byte 2 lies in the first one; the second begins with the second byte of an e acute:

    >>> _token_border([0, 3, 4, 6], 2, "1,\u00e9].".encode())
    2
    """
    after = bisect_right(starts, byte)
    while after < len(starts) - 1 and 0x80 <= text[starts[after]] < 0xC0:
        after += 1
    return after
