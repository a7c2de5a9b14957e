"""Capabilities ``matching`` and ``decoding``, scenario by scenario."""

import sys
from types import SimpleNamespace

import pytest

from conformance.doubles.configs import LONG, config_with, refusal_of
from conformance.doubles.records import make_request
from conformance.doubles.refusals import refused
from rollmatch.objectives.rollout_matching.match import MatchRules, match_objects
from rollmatch.ranks import Ranks
from rollmatch.records import Geometry, GroundTruth, PredictedObject
from rollmatch.rollout import vllm_colocate
from rollmatch.rollout.backend import Decoding
from rollmatch.run.assemble import make_decoding
from rollmatch.run.objectives import match_rules_of

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
    assert all(config_with(f"~.maskiou_gate={gate}") for gate in (0, 1))
    assert {refusal_of(f"~.maskiou_gate={gate}")[0] for gate in (-0.1, 1.1)} == {"out-of-range"}


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


@pytest.mark.scenario(
    "decoding/defaults-decode-greedily", clauses=["decoding/sampling-is-configured-under-decoding#1,2,3,4,5"]
)
def test_defaults_decode_greedily():
    decoding = make_decoding(config_with().custom.extra.rollout_matching)
    assert (decoding.temperature, decoding.top_p, decoding.top_k) == (0, 1.0, -1)


class UnusedEngine:
    """An engine that answers everything with one token."""

    def __init__(self):
        self.runs = 0

    def generate(self, prompts, sampling, *, use_tqdm, lora_request):
        self.runs += 1
        answer = SimpleNamespace(token_ids=[1], finish_reason="length", logprobs=None)
        return [SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[answer]) for prompt in prompts]


def engine_of_100(prompt_len, monkeypatch):
    """A colocated engine that holds 100 tokens, and a request without images."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    engine = UnusedEngine()
    monkeypatch.setattr(vllm_colocate, "_open_engine", lambda settings, ranks: engine)
    vocabulary = SimpleNamespace(stop_ids={0})
    unpictured = {"load_images": lambda sample: [], "num_added_tokens": lambda images: 0}
    template = SimpleNamespace(vocabulary=vocabulary, banned_ids=(), **unpictured)
    settings = vllm_colocate.EngineSettings(model="m", dtype="float32", max_model_len=100)
    backend = vllm_colocate.VllmColocateBackend(settings, template, Ranks())
    backend.policy_version = 1
    return backend, engine, make_request(prompt_token_ids=(5,) * prompt_len)


@pytest.mark.scenario(
    "decoding/a-prompt-that-leaves-no-room-is-refused",
    "decoding/a-prompt-that-leaves-just-enough-room-is-served",
    clauses=["decoding/a-response-leaves-room-for-its-prompt#5"],
)
def test_a_prompt_that_leaves_no_room_is_refused_and_one_that_leaves_just_enough_is_served(monkeypatch):
    backend, engine, request = engine_of_100(41, monkeypatch)
    with refused("prompt-too-long", f"{LONG}vllm.max_model_len", problem="x.jsonl:1"):
        backend.generate([request], Decoding(max_new_tokens=60))
    assert engine.runs == 0
    backend, _, request = engine_of_100(40, monkeypatch)
    assert len(backend.generate([request], Decoding(max_new_tokens=60))) == 1
