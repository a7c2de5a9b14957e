"""Which prediction stands for which true object: a minimum-cost assignment on mask IoU.

Per prediction, the ``candidate_top_k`` true objects with the largest IoU of axis-aligned boxes are candidates (if none
overlaps: the nearest by box centre; ties by ground truth index). A candidate whose mask IoU is under the gate is
forbidden, others cost ``1 - IoU``; an unmatched prediction costs ``fp_cost``, an unmatched true object ``fn_cost``.
Descriptions play no part.

Masks are drawn on a square canvas of ``maskiou_resolution`` cells that spans bins 0..999. An object thinner than a
cell can draw nothing at all; there the IoU of boxes stands in, so that an exact prediction of it is not lost.

Costs are compared in billionths, as whole numbers, so that equal means equal. Among the cheapest solutions the first in
lexicographic order wins: prediction 0 takes the lowest ground truth index it can have in any of them (unmatched comes
last), then prediction 1, and so on.

The slots of a matched prediction learn the bins of its true object. Where one of the two is a polygon, its outline is
carried over by optimal transport.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as coco_mask
from scipy.optimize import linear_sum_assignment
from scipy.special import softmax

from rollmatch.data.geometry import box_around
from rollmatch.records import NUM_BINS, Geometry, GroundTruth, Matching, PredictedObject

Shape = PredictedObject | GroundTruth
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_UNITS = 10**9
"""Cost units in 1.0; sums stay below 2^53, where the solver's doubles are exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchRules:
    """Gate and costs of a match; names as in the configuration."""

    candidate_top_k: int = 10
    maskiou_gate: float = 0.3
    """Least mask IoU of a pair, 0..1."""
    maskiou_resolution: int = 256
    """Cells per side of the canvas."""
    fp_cost: float = 1.0
    fn_cost: float = 1.0


class PairScores(NamedTuple):
    """What a match compares; the same for every gate."""

    candidates: Bools
    """[P, G] which pairs are considered."""
    ious: Floats
    """[P, G] mask IoU."""


def match_objects(
    predicted: Sequence[PredictedObject],
    truth: Sequence[GroundTruth],
    rules: MatchRules,
    scores: PairScores | None = None,
) -> Matching:
    """Assign predictions to ground truth at minimum cost (rules: top of this file).

    ``scores``: of the same objects, where ``score_pairs`` has computed them for another gate.

    Two equal predictions and one true object: the first gets it, the second is a false positive.

    >>> box = dict(desc="seven", geometry=Geometry.BBOX, bins=(100, 100, 300, 300))
    >>> found = PredictedObject(**box, positions=(0, 1, 2, 3))
    >>> match_objects([found, found], [GroundTruth(**box)], MatchRules())  # doctest: +NORMALIZE_WHITESPACE
    Matching(pairs=((0, 0),), ious=(1.0,), false_positives=(1,), false_negatives=(), gating_rejections=0)
    """
    pairs: list[tuple[int, int]] = []
    ious: Floats = np.zeros((len(predicted), len(truth)))
    rejected = 0
    if predicted and truth:
        candidates, ious = scores or score_pairs(predicted, truth, rules)
        allowed = candidates & (ious >= rules.maskiou_gate)
        rejected = int(np.count_nonzero(candidates & ~allowed))
        partners = _assign(_costs(allowed, ious, rules), len(predicted), len(truth))
        pairs = [(row, column) for row, column in enumerate(partners) if column < len(truth)]
    taken, found = {row for row, _ in pairs}, {column for _, column in pairs}
    return Matching(
        pairs=tuple(pairs),
        ious=tuple(float(ious[pair]) for pair in pairs),
        false_positives=tuple(row for row in range(len(predicted)) if row not in taken),
        false_negatives=tuple(column for column in range(len(truth)) if column not in found),
        gating_rejections=rejected,
    )


def outline(shape: Shape) -> tuple[int, ...]:
    """[2n] corners x y x y ... of a polygon, or of a box: top left, top right, bottom right, bottom left.

    >>> outline(GroundTruth(desc="a", geometry=Geometry.BBOX, bins=(1, 2, 5, 8)))
    (1, 2, 5, 2, 5, 8, 1, 8)
    """
    if shape.geometry is Geometry.POLY:
        return shape.bins
    left, top, right, bottom = shape.bins
    return (left, top, right, top, right, bottom, left, bottom)


def score_pairs(predicted: Sequence[Shape], truth: Sequence[Shape], rules: MatchRules) -> PairScores:
    """Candidates and IoU of all pairs, of at least one prediction and one true object; the gate plays no part."""
    boxes, true_boxes = (np.array([box_around(each.bins) for each in shapes]) for shapes in (predicted, truth))
    overlaps = box_ious(boxes, true_boxes)
    candidates = _candidates(overlaps, _centre_distances(boxes, true_boxes), rules.candidate_top_k)
    ious, drawn = _mask_ious(predicted, truth, rules.maskiou_resolution)
    return PairScores(candidates, np.where(drawn, ious, overlaps))


def box_ious(boxes: Ints, true_boxes: Ints) -> Floats:
    """[P, G] of [P, 4] and [G, 4]; 0 where both boxes are empty.

    >>> box_ious(np.array([[0, 0, 2, 4], [5, 5, 5, 5]]), np.array([[1, 0, 3, 4], [5, 5, 5, 5]])).round(2).tolist()
    [[0.33, 0.0], [0.0, 0.0]]
    """
    low = np.maximum(boxes[:, None, :2], true_boxes[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], true_boxes[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(axis=-1)
    areas, true_areas = ((each[:, 2:] - each[:, :2]).prod(axis=-1) for each in (boxes, true_boxes))
    union = areas[:, None] + true_areas[None, :] - shared
    ious: Floats = np.divide(shared, union, out=np.zeros(union.shape), where=union > 0)
    return ious


def _centre_distances(boxes: Ints, true_boxes: Ints) -> Ints:
    """[P, G] four times the squared distance of centres: whole numbers, so that ties are exact.

    >>> _centre_distances(np.array([[0, 0, 2, 2]]), np.array([[4, 2, 7, 4], [1, 1, 1, 1]])).tolist()
    [[97, 0]]
    """
    centres, true_centres = (each[:, :2] + each[:, 2:] for each in (boxes, true_boxes))
    distances: Ints = ((centres[:, None] - true_centres[None]) ** 2).sum(axis=-1)
    return distances


def _candidates(overlaps: Floats, distances: Ints, top_k: int) -> Bools:
    """[P, G] the best ``top_k`` of each row.

    >>> _candidates(np.array([[0.2, 0.5, 0.2], [0.0, 0.0, 0.0]]), np.array([[0, 0, 0], [9, 4, 1]]), 2)
    array([[ True,  True, False],
           [False,  True,  True]])
    """
    keys = np.where(overlaps.max(axis=1, keepdims=True) > 0, -overlaps, distances)
    best = np.argsort(keys, axis=1, kind="stable")[:, :top_k]
    candidates = np.zeros(overlaps.shape, dtype=bool)
    np.put_along_axis(candidates, best, True, axis=1)
    return candidates


def _mask_ious(predicted: Sequence[Shape], truth: Sequence[Shape], resolution: int) -> tuple[Floats, Bools]:
    """[P, G] mask IoU, and whether both masks hold any cell. Bin 999 is the last cell's place, ``resolution - 1``."""
    scale = (resolution - 1) / (NUM_BINS - 1)
    masks, true_masks = (
        coco_mask.frPyObjects([[k * scale for k in outline(shape)] for shape in shapes], resolution, resolution)
        for shapes in (predicted, truth)
    )
    # The width of a mask's box shows whether the mask has a cell; coco_mask.area fails on more than 255 masks (2.0.11).
    drawn = (coco_mask.toBbox(masks)[:, 2] > 0)[:, None] & (coco_mask.toBbox(true_masks)[:, 2] > 0)[None, :]
    return coco_mask.iou(masks, true_masks, [0] * len(true_masks)), drawn


def _costs(allowed: Bools, ious: Floats, rules: MatchRules) -> Ints:
    """[P + G, P + G] in units: real pairs, a dummy partner for everything, dummies among themselves free.

    A forbidden pair costs more than leaving both unmatched, so no cheapest solution holds one.
    """
    num_predicted, num_truth = allowed.shape
    false_positive, false_negative = round(rules.fp_cost * _UNITS), round(rules.fn_cost * _UNITS)
    costs = np.zeros((num_predicted + num_truth,) * 2, dtype=np.int64)
    pair_costs = np.rint((1 - ious) * _UNITS).astype(np.int64)
    costs[:num_predicted, :num_truth] = np.where(allowed, pair_costs, false_positive + false_negative + 1)
    costs[:num_predicted, num_truth:] = false_positive
    costs[num_predicted:, :num_truth] = false_negative
    return costs


def _assign(costs: Ints, num_predicted: int, num_truth: int) -> list[int]:
    """[P] the column of each prediction in the lexicographically first of the cheapest solutions.

    >>> _assign(np.array([[5, 3], [3, 1]]), 2, 2)  # SciPy alone: [1, 0]
    [0, 1]
    >>> _assign(np.array([[2, 1, 0], [2, 1, 0], [2, 1, 0]]), 3, 3)  # SciPy alone: [2, 1, 0]
    [0, 1, 2]
    """
    columns, costs = _solve(costs), costs.copy()
    least = _total(costs, columns)
    tight = _slack(costs, columns) == 0
    for row in range(num_predicted):
        lower = tight[row, : min(int(columns[row]), num_truth)].copy()
        lower[[column for column in columns[:row] if column < len(lower)]] = False
        own = costs[row].copy()
        for column in np.flatnonzero(lower):
            _fix(costs, row, column=column, own=own, forbidden=least + 1)
            trial = _solve(costs)
            if _total(costs, trial) == least:  # so the row has this column
                columns = trial
                break
        _fix(costs, row, column=columns[row], own=own, forbidden=least + 1)
    return [int(column) for column in columns[:num_predicted]]


def _solve(costs: Ints) -> Ints:
    columns: Ints = linear_sum_assignment(costs)[1]
    return columns


def _total(costs: Ints, columns: Ints) -> int:
    return int(costs[np.arange(len(columns)), columns].sum())


def _fix(costs: Ints, row: int, *, column: int, own: Ints, forbidden: int) -> None:
    """Put every column but one out of the row's reach; ``own``: its costs."""
    costs[row] = forbidden
    costs[row, column] = own[column]


def _slack(costs: Ints, columns: Ints) -> Ints:
    """[N, N] reduced costs under dual prices of a cheapest solution: only pairs at 0 occur in cheapest solutions.

    The price of a column is the length of the shortest chain of swaps that ends in it (Bellman-Ford; ends, because a
    cheapest solution has no chain of swaps that gains).
    """
    own = costs[np.arange(len(columns)), columns]
    swaps = costs - own[:, None]
    prices = np.zeros(len(columns), dtype=np.int64)
    while True:
        shorter = np.minimum(prices, (swaps + prices[columns][:, None]).min(axis=0))
        if np.array_equal(shorter, prices):
            break
        prices = shorter
    rows = own - prices[columns]
    slack: Ints = costs - rows[:, None] - prices[None, :]
    return slack


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
    points, true_points = (np.array(outline(shape), dtype=np.float64).reshape(-1, 2) for shape in (predicted, truth))
    projected = _project(points, true_points, rules)
    if predicted.geometry is Geometry.BBOX:
        projected = np.concatenate([projected.min(axis=0), projected.max(axis=0)])
    return tuple(int(k) for k in np.rint(projected).ravel())  # means of true bins, so within their range


def _project(points: Floats, true_points: Floats, rules: TransportRules) -> Floats:
    """[N, 2] the mean true point of each point under the transport plan between [N, 2] and [M, 2].

    The plan is ``exp(kernel + row scale + column scale)``; a mean over a row does not see the row's own scale.
    """
    order = 2 if rules.ot_cost == "l2" else 1
    kernel = -np.linalg.norm(points[:, None] - true_points[None], ord=order, axis=-1) / rules.ot_epsilon
    column_scales = np.zeros(len(true_points))
    for _ in range(rules.ot_iters):
        row_scales = -np.log(len(points)) - np.logaddexp.reduce(kernel + column_scales[None, :], axis=1)
        column_scales = -np.log(len(true_points)) - np.logaddexp.reduce(kernel + row_scales[:, None], axis=0)
    weights = softmax(kernel + column_scales[None, :], axis=1)
    projected: Floats = weights @ true_points
    return projected
