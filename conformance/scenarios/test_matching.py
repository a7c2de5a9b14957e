"""Capability ``matching``, scenario by scenario."""

import pytest

from conformance.scenarios.configs import config_with, refusal_of
from rollmatch.cli.objectives import match_rules_of
from rollmatch.errors import ErrorList
from rollmatch.objectives.rollout_matching.match import MatchRules, match_objects
from rollmatch.records import Geometry, GroundTruth, PredictedObject

SEVEN = (100, 100, 300, 300)


def truth(*bins, desc="seven"):
    return GroundTruth(desc=desc, geometry=Geometry.BBOX, bins=bins)


def predicted(*bins, desc="seven"):
    return PredictedObject(desc=desc, geometry=Geometry.BBOX, bins=bins, positions=(0, 1, 2, 3))


def overlap(iou):
    """A prediction and a true object whose masks overlap by ``iou`` (to a hundredth)."""
    return predicted(0, 0, 500, round(500 * iou)), truth(0, 0, 500, 500)


@pytest.mark.scenario(
    "matching/a-pair-that-costs-more-than-leaving-both-alone-is-not-matched",
    clauses=["matching/matching-is-a-cheapest-assignment-on-mask-overlap#3,4"],
)
def test_a_pair_that_costs_more_than_leaving_both_alone_is_not_matched():
    one, other = overlap(0.4)
    found = match_objects([one], [other], MatchRules(maskiou_gate=0.3, fp_cost=0.2, fn_cost=0.2))
    assert (found.pairs, found.false_positives, found.false_negatives) == ((), (0,), (0,))
    assert match_objects([one], [other], MatchRules(maskiou_gate=0.3)).pairs == ((0, 0),)
    rules = config_with().custom.extra.rollout_matching
    assert (rules.fp_cost, rules.fn_cost) == (1.0, 1.0)


@pytest.mark.scenario("matching/overlap-at-the-gate", clauses=["matching/poor-overlaps-are-gated#2,3"])
def test_overlap_at_the_gate():
    one, other = overlap(0.31)
    found = match_objects([one], [other], MatchRules(maskiou_gate=0.3))
    assert found.pairs == ((0, 0),)
    rules = match_rules_of(config_with().custom.extra.rollout_matching, gate=0.3)
    assert rules == MatchRules(candidate_top_k=10, maskiou_gate=0.3, maskiou_resolution=256)
    assert config_with().custom.extra.rollout_matching.maskiou_gate == 0.3
    for gate in ("0", "1"):
        assert config_with(f"~.maskiou_gate={gate}")
    for gate in ("-0.1", "1.1"):
        assert refusal_of(f"~.maskiou_gate={gate}")[0] == "out-of-range"


SLANTED = GroundTruth(desc="a", geometry=Geometry.POLY, bins=(100, 100, 110, 100, 300, 300, 290, 300))
"""The bounding box of SEVEN, and a mask that hardly overlaps it."""


@pytest.mark.scenario(
    "matching/only-the-best-candidate-counts", clauses=["matching/candidates-are-the-nearest-true-objects#1,3"]
)
def test_only_the_best_candidate_counts():
    shapes = [predicted(*SEVEN)], [SLANTED, truth(150, 100, 350, 300)]
    found = match_objects(*shapes, MatchRules(candidate_top_k=1, maskiou_gate=0.3))
    assert (found.pairs, found.gating_rejections, found.false_negatives) == ((), 1, (0, 1))
    assert config_with().custom.extra.rollout_matching.candidate_top_k == 10


def test_the_check_knows_a_refusal():
    with pytest.raises(ErrorList):
        config_with("~.maskiou_gate=2")
