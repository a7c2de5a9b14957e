"""What each token of a segment is to teach: a text label, a coordinate bin, or nothing. Needs no torch.

With P = ``prompt_len``, X = ``prefix_len``, L = ``encoded_len``:

==================  ==========================================================================
``[0, P)``          prompt: nothing
``[P, P + X)``      the rollout's own words: nothing, but slots of matched objects learn the true bin, and tokens of
                    their numbers, and of their descriptions with ``desc_ce_weight_matched``, the true token
                    (``target``)
``[P + X, L)``      appended tail: coordinate tokens learn their own bin; every other token its own id,
                    with weight 1, or ``desc_ce_weight`` inside a description; closing and EOS included
==================  ==========================================================================

A coordinate token never gets a text label, wherever it stands. Source: the rollout-matching objective
(prefix slots and tail supervised, everything else context).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from rollmatch.errors import LearnError
from rollmatch.objectives.rollout_matching.match import outline
from rollmatch.records import NUM_BINS, Geometry, GroundTruth, PredictedObject, Segment, Supervision

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
    >>> s.coord_positions, s.coord_bins, s.coord_in_prefix
    ((3, 6), (4, 5), (True, False))
    """
    _check_lens(segment)
    _check_positions(segment)
    _check_slots(segment, bin_of)
    tail_start = segment.prompt_len + segment.prefix_len
    tail_bins = [(index, bin_of(segment.token_ids[index])) for index in range(tail_start, segment.encoded_len)]
    tail_slots = [(index, coord_bin) for index, coord_bin in tail_bins if coord_bin is not None]
    weights = _text_weights(segment, (index for index, coord_bin in tail_bins if coord_bin is None), rules)
    labels = [i if weight else IGNORED for i, weight in zip(segment.token_ids, weights, strict=True)]
    desc = frozenset(segment.desc_positions)
    for index, label in zip(segment.corrected_positions, segment.corrected_labels, strict=True):
        weight = rules.desc_ce_weight_matched if index in desc else 1.0
        weights[index] = weight if label != IGNORED else 0.0
        labels[index] = label if weight else IGNORED
    return Supervision(
        labels=tuple(labels),
        weights=tuple(weights),
        coord_positions=(*segment.coord_positions, *(index for index, _ in tail_slots)),
        coord_bins=(*segment.coord_bins, *(coord_bin for _, coord_bin in tail_slots)),
        coord_in_prefix=(True,) * len(segment.coord_positions) + (False,) * len(tail_slots),
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

    >>> one = Supervision(labels=(-100, 5), weights=(0.0, 1.0), coord_positions=(1,), coord_bins=(8,),
    ...                   coord_in_prefix=(True,))
    >>> both = place_supervisions([one, one], starts=[0, 3], num_tokens=5)
    >>> both.labels, both.coord_positions
    ((-100, 5, -100, -100, 5), (1, 4))
    """
    labels, weights = [IGNORED] * num_tokens, [0.0] * num_tokens
    slots: list[tuple[int, int, bool]] = []
    for part, start in zip(supervisions, starts, strict=True):
        labels[start : start + len(part.labels)] = part.labels
        weights[start : start + len(part.weights)] = part.weights
        moved = (start + position for position in part.coord_positions)
        slots += zip(moved, part.coord_bins, part.coord_in_prefix, strict=True)
    return Supervision(
        labels=tuple(labels),
        weights=tuple(weights),
        coord_positions=tuple(position for position, _, _ in slots),
        coord_bins=tuple(coord_bin for _, coord_bin, _ in slots),
        coord_in_prefix=tuple(in_prefix for _, _, in_prefix in slots),
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
    for index, coord_bin in zip(segment.coord_positions, segment.coord_bins, strict=True):
        if bin_of(segment.token_ids[index]) is None:
            problem = f"token {segment.token_ids[index]} of slot {index} is no coordinate"
            raise LearnError(problem, code="slot-holds-no-coord", key=origin)
        if not 0 <= coord_bin < NUM_BINS:
            problem = f"bin {coord_bin} of slot {index} is none of {NUM_BINS}"
            raise LearnError(problem, code="slot-bin-out-of-range", key=origin)


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportRules:
    """How outlines are carried over; the names are the YAML's."""

    ot_cost: Literal["l2", "l1"] = "l2"
    """Distance of two points in bins: Euclidean or Manhattan."""
    ot_epsilon: float = 10.0
    """Entropy weight in bins; the smaller, the closer each point keeps to one true point."""
    ot_iters: int = 30


def coordinate_targets(predicted: PredictedObject, truth: GroundTruth, rules: TransportRules) -> tuple[int, ...]:
    """[len(predicted.bins)] true bins for the slots of a prediction, rounded half to even, within 0..999.

    A predicted box with a polygon as its truth gets the box around its four projected corners.

    >>> far_apart = (100, 100, 300, 100, 300, 300, 100, 300)
    >>> predicted = PredictedObject(desc="a", geometry=Geometry.POLY, bins=far_apart, positions=tuple(range(8)))
    >>> truth = GroundTruth(desc="a", geometry=Geometry.BBOX, bins=(110, 90, 320, 310))
    >>> coordinate_targets(predicted, truth, TransportRules())
    (110, 90, 320, 90, 320, 310, 110, 310)
    """
    if predicted.geometry is Geometry.BBOX and truth.geometry is Geometry.BBOX:
        return truth.bins
    projected = _project(_points(outline(predicted)), _points(outline(truth)), rules)
    if predicted.geometry is Geometry.BBOX:
        projected = np.concatenate([projected.min(axis=0), projected.max(axis=0)])
    return tuple(int(k) for k in np.clip(np.rint(projected), 0, NUM_BINS - 1).ravel())


def _points(flat: Sequence[int]) -> Floats:
    return np.array(flat, dtype=np.float64).reshape(-1, 2)


def _project(points: Floats, true_points: Floats, rules: TransportRules) -> Floats:
    """[N, 2] the mean true point of each point under the transport plan between [N, 2] and [M, 2].

    The plan is ``exp(kernel + row scale + column scale)``; a mean over a row does not see the row's own scale.
    """
    kernel = -_distances(points, true_points, rules) / rules.ot_epsilon
    column_scales = np.zeros(len(true_points))
    for _ in range(rules.ot_iters):
        row_scales = -np.log(len(points)) - np.logaddexp.reduce(kernel + column_scales[None, :], axis=1)
        column_scales = -np.log(len(true_points)) - np.logaddexp.reduce(kernel + row_scales[:, None], axis=0)
    weights = softmax(kernel + column_scales[None, :], axis=1)
    projected: Floats = weights @ true_points
    return projected


def _distances(points: Floats, true_points: Floats, rules: TransportRules) -> Floats:
    """[N, M] bins."""
    order = 2 if rules.ot_cost == "l2" else 1
    distances: Floats = np.linalg.norm(points[:, None] - true_points[None], ord=order, axis=-1)
    return distances
