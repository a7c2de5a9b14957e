"""Matching and coordinate targets: candidates, gate, costs, ties; true bins for boxes, transported points else."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as coco_mask

from conformance.doubles.answers import BOX, FAR_BOX, box, boxes, poly, polys
from rollmatch.objectives.rollout_matching.match import (
    MatchRules,
    TransportRules,
    coordinate_targets,
    match_objects,
    outline,
)
from rollmatch.records import Matching, PredictedObject


def found(shape):
    positions = tuple(range(len(shape.bins)))
    return PredictedObject(desc=shape.desc, geometry=shape.geometry, bins=shape.bins, positions=positions)


def match(predicted, truth, **rules):
    return match_objects([found(each) for each in predicted], truth, MatchRules(**rules))


def mask_iou(one, other, resolution=256):
    """One pair at a time, each shape drawn alone."""
    runs = [
        coco_mask.frPyObjects([[k * (resolution - 1) / 999 for k in outline(each)]], resolution, resolution)
        for each in (one, other)
    ]
    return coco_mask.iou(*runs, [0])[0, 0]


def brute_force(allowed, ious, rules):
    """Every way to give each prediction a partner or none, cheapest first, then lowest partners first."""
    num_predicted, num_truth = allowed.shape
    unit = 10**9
    slots = [*range(num_truth), *[num_truth] * num_predicted]
    best = []
    for partners in set(permutations(slots, num_predicted)):
        pairs = [(p, t) for p, t in enumerate(partners) if t < num_truth]
        if not all(allowed[pair] for pair in pairs):
            continue
        cost = sum(round((1 - ious[pair]) * unit) for pair in pairs)
        cost += (num_predicted - len(pairs)) * round(rules.fp_cost * unit)
        cost += (num_truth - len(pairs)) * round(rules.fn_cost * unit)
        best.append((cost, partners, tuple(pairs)))
    return min(best)[2]


def box_iou(one, other):
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(0, width) * max(0, height)
    areas = [(bins[2] - bins[0]) * (bins[3] - bins[1]) for bins in (one, other)]
    return shared / (sum(areas) - shared)


def candidates_of(predicted, truth, top_k):
    def far(t):
        return sum((predicted.bins[k] + predicted.bins[k + 2] - t.bins[k] - t.bins[k + 2]) ** 2 for k in (0, 1))

    ious = [box_iou(predicted.bins, t.bins) for t in truth]
    keys = [-iou for iou in ious] if max(ious) > 0 else [far(t) for t in truth]
    return sorted(range(len(truth)), key=lambda t: (keys[t], t))[:top_k]


def small_boxes():
    """Boxes from so few that ties, duplicates and gate rejections are common."""
    side = st.sampled_from([(100, 300), (100, 340), (180, 380), (600, 800)])
    return st.builds(lambda x, y: box(x[0], y[0], x[1], y[1]), side, side)


@pytest.mark.scenario(
    "matching/the-better-partner-wins",
    "matching/a-pair-that-costs-less-than-leaving-both-alone-is-matched",
    clauses=[
        "matching/matching-is-a-cheapest-assignment-on-mask-overlap#1,2,3",
        "matching/ties-are-broken-the-same-way-every-time#1",
    ],
)
@given(
    st.lists(small_boxes(), min_size=1, max_size=4),
    st.lists(small_boxes(), min_size=1, max_size=4),
    st.sampled_from([(1.0, 1.0), (0.2, 0.1), (0.5, 2.0), (0.0, 0.0)]),
    st.integers(1, 3),
)
def test_the_cheapest_matching_with_the_lowest_indices_wins(predicted, truth, prices, top_k):
    rules = MatchRules(fp_cost=prices[0], fn_cost=prices[1], candidate_top_k=top_k, maskiou_resolution=64)
    ious = np.array([[mask_iou(p, t, 64) for t in truth] for p in predicted])
    candidates = np.zeros(ious.shape, dtype=bool)
    for row, each in enumerate(predicted):
        candidates[row, candidates_of(each, truth, top_k)] = True
    matching = match_objects([found(each) for each in predicted], truth, rules)
    assert matching.pairs == brute_force(candidates & (ious >= 0.3), ious, rules)
    assert matching.gating_rejections == (candidates & (ious < 0.3)).sum()
    assert matching.ious == pytest.approx([ious[pair] for pair in matching.pairs])


@pytest.mark.scenario("matching/a-thin-box-can-be-matched", clauses=["matching/poor-overlaps-are-gated#4"])
@given(st.integers(0, 998), st.integers(0, 998), st.integers(1, 500), st.integers(1, 500))
def test_an_exact_prediction_is_matched_however_small(left, top, width, height):
    shape = box(left, top, min(999, left + width), min(999, top + height))
    assert match([shape], [shape]).pairs == ((0, 0),)
    assert match([shape], [shape]).ious == (1.0,)


@pytest.mark.scenario(
    "matching/missed-objects-keep-their-order", clauses=["matching/ties-are-broken-the-same-way-every-time#2"]
)
def test_nothing_predicted_misses_everything_and_nothing_true_leaves_everything():
    nothing = Matching(pairs=(), ious=(), false_positives=(), false_negatives=(0, 1), gating_rejections=0)
    assert match([], [box(), box()]) == nothing
    assert match([box()], []).false_positives == (0,)
    assert match([], []).pairs == ()


@pytest.mark.scenario("matching/overlap-below-the-gate", clauses=["matching/poor-overlaps-are-gated#1,5"])
def test_the_gate_rejects_and_counts_and_lets_the_exact_value_through():
    half, whole, tenth = ([box(0, 0, 999, bottom)] for bottom in (500, 999, 100))
    assert match(whole, tenth, maskiou_resolution=11, maskiou_gate=0).ious == (0.1,), "the canvas ends at bin 999"
    assert match(half, whole, maskiou_resolution=11).ious == (0.5,)
    assert match(half, whole, maskiou_resolution=11, maskiou_gate=0.5).pairs == ((0, 0),)
    rejected = match(half, whole, maskiou_resolution=11, maskiou_gate=0.51)
    assert (rejected.pairs, rejected.gating_rejections) == ((), 1)
    assert (rejected.false_positives, rejected.false_negatives) == ((0,), (0,))


@pytest.mark.scenario(
    "matching/the-second-candidate-counts-too", clauses=["matching/candidates-are-the-nearest-true-objects#1"]
)
def test_only_candidates_are_gated():
    truth = [box(*FAR_BOX), box(100, 100, 310, 310), box(0, 0, 20, 20)]
    assert match([box()], truth, candidate_top_k=1).gating_rejections == 0
    assert match([box()], truth, candidate_top_k=3).gating_rejections == 2
    crowd = [box(100, 100, 300, 290), box(100, 100, 300, 280)]
    only_best = match([box(), box()], crowd, candidate_top_k=1)
    assert (only_best.pairs, only_best.false_negatives) == (((0, 0),), (1,))
    assert match([box(), box()], crowd, candidate_top_k=2).pairs == ((0, 0), (1, 1))


@pytest.mark.scenario(
    "matching/without-any-overlap-the-nearest-counts", clauses=["matching/candidates-are-the-nearest-true-objects#2"]
)
def test_each_prediction_for_itself_looks_for_overlap_or_for_the_nearest():
    truth = [box(*FAR_BOX), box(400, 400, 410, 410), box()]
    touching, lost = box(), box(430, 430, 440, 440)
    assert match([touching, lost], truth, candidate_top_k=1, maskiou_gate=0).pairs == ((0, 2), (1, 1))


def test_the_iou_of_boxes_stands_in_where_either_mask_has_no_cell_and_only_there():
    thin, wide = box(500, 0, 501, 999), box(0, 0, 999, 999)
    for pair in ((thin, wide), (wide, thin)):
        (iou,) = match(*([each] for each in pair), maskiou_resolution=11, maskiou_gate=0).ious
        assert iou == pytest.approx(1 / 999)
    at_the_edge = poly(0, 0, 999, 0, 0, 999)
    assert match([at_the_edge], [wide]).ious[0] == pytest.approx(0.5, abs=0.01)


def test_a_polygon_is_matched_by_its_area_not_by_its_box():
    triangle = poly(100, 100, 300, 100, 300, 300)
    other_half = poly(100, 100, 100, 300, 300, 300)
    assert match([triangle], [other_half], maskiou_gate=0.05).pairs == ()
    assert match([triangle], [box(*BOX)]).ious[0] == pytest.approx(0.5, abs=0.02)
    assert match([triangle], [triangle]).pairs == ((0, 0),)


@pytest.mark.scenario(
    "matching/two-equal-predictions-and-one-true-object",
    "matching/two-equal-predictions-and-two-equal-true-objects",
    "matching/a-wrong-description-is-still-a-match",
    clauses=[
        "matching/ties-are-broken-the-same-way-every-time#1,2",
        "matching/matching-is-a-cheapest-assignment-on-mask-overlap#5",
    ],
)
def test_many_equal_objects_are_paired_in_order_whatever_they_are_called():
    matching = match([box(desc="two")] * 40, [box(desc="seven")] * 30, candidate_top_k=30)
    assert matching.pairs == tuple((k, k) for k in range(30))
    assert matching.false_positives == tuple(range(30, 40))
    assert match([box()] * 300, [box(*FAR_BOX)] * 2 + [box()]).pairs == ((0, 2),)
    assert match([box()] * 2, [box()] * 300).pairs == ((0, 0), (1, 1))
    pairs_of_equals = [box(100, 100, 300, 290)] * 2 + [box()] * 2
    assert match([box()], pairs_of_equals * 5, candidate_top_k=1).pairs == ((0, 2),), "candidates keep their order, too"


DEFAULTS = TransportRules()
SHARP = TransportRules(ot_epsilon=0.5, ot_iters=200)


def targets(predicted, truth, rules=DEFAULTS):
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


@given(boxes(), boxes(), st.sampled_from([DEFAULTS, SHARP]))
def test_a_box_learns_the_true_box(predicted, truth, rules):
    assert targets(predicted, truth, rules) == truth.bins


@given(
    boxes() | polys(), boxes() | polys(), st.sampled_from([DEFAULTS, SHARP, TransportRules(ot_cost="l1", ot_iters=1)])
)
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


@pytest.mark.scenario(
    "supervision/a-polygon-predicted-for-a-true-box",
    clauses=["supervision/coordinates-are-learnt-as-distributions-over-bins#7"],
)
def test_a_polygon_learns_the_corners_of_a_box_and_finds_points_of_one_that_starts_elsewhere():
    turned = poly(322, 277, 92, 308, 101, 97, 303, 104)
    truth = poly(100, 100, 300, 100, 320, 280, 90, 310)
    assert targets(turned, truth) == (320, 280, 90, 310, 100, 100, 300, 100)
    assert targets(poly(98, 104, 305, 95, 299, 302, 103, 296), box(100, 100, 300, 300)) == (
        100, 100, 300, 100, 300, 300, 100, 300,
    )  # fmt: skip


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
