"""Coordinate targets: true bins for boxes, transported points for everything else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.objectives.answers import box, boxes, poly, polys
from rollmatch.objectives.rollout_matching.supervision import TransportRules, coordinate_targets
from rollmatch.records import PredictedObject

RULES = TransportRules()
SHARP = TransportRules(ot_epsilon=0.5, ot_iters=200)


def targets(predicted, truth, rules=RULES):
    positions = tuple(range(len(predicted.bins)))
    slots = PredictedObject(desc="a", geometry=predicted.geometry, bins=predicted.bins, positions=positions)
    return coordinate_targets(slots, truth, rules)


def naive(points, true_points, rules):
    """Sinkhorn with plain kernels and multiplications."""
    gaps = points[:, None] - true_points[None]
    costs = np.abs(gaps).sum(-1) if rules.ot_cost == "l1" else np.sqrt((gaps**2).sum(-1))
    kernel = np.exp(-costs / rules.ot_epsilon)
    columns = np.ones(len(true_points))
    for _ in range(rules.ot_iters):
        rows = 1 / len(points) / (kernel @ columns)
        columns = 1 / len(true_points) / (kernel.T @ rows)
    plan = rows[:, None] * kernel * columns[None]
    return plan @ true_points / plan.sum(axis=1, keepdims=True)


@given(boxes(), boxes(), st.sampled_from([RULES, SHARP]))
def test_a_box_learns_the_true_box(predicted, truth, rules):
    assert targets(predicted, truth, rules) == truth.bins


@given(boxes() | polys(), boxes() | polys(), st.sampled_from([RULES, SHARP, TransportRules(ot_cost="l1", ot_iters=1)]))
def test_every_slot_gets_one_bin_inside_the_true_outline_s_box(predicted, truth, rules):
    got = targets(predicted, truth, rules)
    assert len(got) == len(predicted.bins)
    assert all(isinstance(k, int) for k in got)
    assert min(truth.bins[0::2]) <= min(got[0::2]) <= max(got[0::2]) <= max(truth.bins[0::2])
    assert min(truth.bins[1::2]) <= min(got[1::2]) <= max(got[1::2]) <= max(truth.bins[1::2])


@pytest.mark.parametrize("ot_cost", ["l1", "l2"])
def test_it_is_sinkhorn(ot_cost):
    rules = TransportRules(ot_cost=ot_cost, ot_epsilon=40.0, ot_iters=7)
    predicted, truth = poly(10, 10, 90, 20, 80, 90, 40, 95, 5, 70), poly(20, 15, 95, 15, 50, 99)
    points, true_points = (np.array(each.bins, dtype=float).reshape(-1, 2) for each in (predicted, truth))
    expected = np.rint(naive(points, true_points, rules)).astype(int)
    assert targets(predicted, truth, rules) == tuple(expected.ravel())


def test_the_distance_decides():
    predicted, truth = poly(100, 100, 160, 160, 100, 190), poly(100, 100, 160, 100, 130, 175, 90, 90)
    l1, l2 = (targets(predicted, truth, TransportRules(ot_cost=cost, ot_epsilon=20.0)) for cost in ("l1", "l2"))
    assert l1 != l2


def test_a_polygon_that_starts_elsewhere_finds_its_points():
    truth = poly(100, 100, 300, 100, 320, 280, 90, 310)
    turned = poly(322, 277, 92, 308, 101, 97, 303, 104)
    assert targets(turned, truth) == (320, 280, 90, 310, 100, 100, 300, 100)


@pytest.mark.scenario(
    "supervision/a-polygon-predicted-for-a-true-box",
    clauses=["supervision/coordinates-are-learnt-as-distributions-over-bins#7"],
)
def test_a_polygon_with_a_box_as_truth_learns_its_corners():
    assert targets(poly(98, 104, 305, 95, 299, 302, 103, 296), box(100, 100, 300, 300)) == (
        *(100, 100, 300, 100),
        *(300, 300, 100, 300),
    )


def test_a_box_with_a_polygon_as_truth_learns_the_box_round_the_projections():
    diamond = poly(200, 100, 300, 200, 200, 300, 100, 200)
    left, top, right, bottom = targets(box(100, 100, 300, 300), diamond)
    assert 100 <= left < right <= 300
    assert 100 <= top < bottom <= 300
    skewed = poly(110, 100, 300, 90, 310, 300, 90, 310)
    assert targets(box(100, 100, 300, 300), skewed) == (90, 90, 310, 310)
    assert targets(box(100, 100, 300, 300), poly(100, 100, 300, 100, 300, 300, 100, 300)) == (100, 100, 300, 300)


def test_a_tiny_epsilon_far_apart_stays_finite():
    rules = TransportRules(ot_epsilon=0.001, ot_iters=5)
    assert targets(poly(0, 0, 1, 0, 0, 1), poly(999, 999, 998, 999, 999, 998), rules)
