"""Which bins the coordinate slots of a matched prediction should have held.

Two boxes: the true bins. Otherwise the two outlines are point sets of different size or order; entropy-regularised
optimal transport (Sinkhorn; Cuturi 2013) with equal mass on every point says which true points each predicted point
stands for, and their mean under the plan (the barycentric projection) is where it should have been. The iteration runs
on logarithms, so no cost is too large for the kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from rollmatch.objectives.rollout_matching.match import outline
from rollmatch.records import NUM_BINS, Geometry, GroundTruth, PredictedObject

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportRules:
    """How outlines are carried over; the names are the YAML's."""

    ot_cost: Literal["l2", "l1"] = "l2"
    """Distance of two points in bins: Euclidean or Manhattan."""
    ot_epsilon: float = 10.0
    """Entropy weight in bins; the smaller, the closer each point keeps to one true point."""
    ot_iters: int = 30

    def __post_init__(self) -> None:
        assert self.ot_cost in ("l2", "l1")
        assert self.ot_epsilon > 0
        assert self.ot_iters >= 1


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
