"""Capability ``decoding``, scenario by scenario."""

import sys
from types import SimpleNamespace

import pytest

from conformance.scenarios.configs import LONG, config_with, not_refused
from rollmatch.cli.assemble import _make_decoding
from rollmatch.ranks import Ranks
from rollmatch.records import RolloutRequest, Sample
from rollmatch.rollout import vllm_colocate
from rollmatch.rollout.backend import Decoding


def accepted(*overrides):
    """The rollout settings of a config, which fails the test when it is refused."""
    with not_refused():
        return config_with(*overrides).custom.extra.rollout_matching


@pytest.mark.scenario(
    "decoding/defaults-decode-greedily", clauses=["decoding/sampling-is-configured-under-decoding#1,2,3,4"]
)
def test_defaults_decode_greedily():
    decoding = _make_decoding(accepted())
    assert (decoding.temperature, decoding.top_p, decoding.top_k) == (0, 1.0, -1)


class UnusedEngine:
    """An engine that answers everything with one token."""

    def __init__(self):
        self.runs = 0

    def generate(self, prompts, sampling, *, use_tqdm):
        self.runs += 1
        answer = SimpleNamespace(token_ids=[1], finish_reason="length")
        return [SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[answer]) for prompt in prompts]


def engine_of_100(prompt_len, monkeypatch):
    """A colocated engine that holds 100 tokens, and a request without images."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    engine = UnusedEngine()
    monkeypatch.setattr(vllm_colocate, "_open_engine", lambda settings, ranks: engine)
    vocabulary = SimpleNamespace(stop_id=0)
    unpictured = {"load_images": lambda sample: [], "num_added_tokens": lambda images: 0}
    template = SimpleNamespace(vocabulary=vocabulary, banned_ids=(), **unpictured)
    settings = vllm_colocate.EngineSettings(model="m", dtype="float32", max_model_len=100)
    backend = vllm_colocate.VllmColocateBackend(settings, template, Ranks())
    backend.policy_version = 1
    sample = Sample(sample_id=0, origin="train.jsonl:7", images=(), objects=(), width=8, height=8)
    request = RolloutRequest(request_id="0.0.0", sample=sample, prompt_token_ids=(5,) * prompt_len, seed=1)
    return backend, engine, request


@pytest.mark.scenario(
    "decoding/a-prompt-that-leaves-no-room-is-refused", clauses=["decoding/a-response-leaves-room-for-its-prompt#5"]
)
def test_a_prompt_that_leaves_no_room_is_refused(monkeypatch):
    backend, engine, request = engine_of_100(41, monkeypatch)
    with pytest.raises(vllm_colocate.PromptTooLong) as caught:
        backend.generate([request], Decoding(max_new_tokens=60))
    assert (caught.value.code, caught.value.key) == ("prompt-too-long", f"{LONG}vllm.max_model_len")
    assert "train.jsonl:7" in caught.value.problem
    assert engine.runs == 0


@pytest.mark.scenario("decoding/a-prompt-that-leaves-just-enough-room-is-served")
def test_a_prompt_that_leaves_just_enough_room_is_served(monkeypatch):
    backend, _, request = engine_of_100(40, monkeypatch)
    with not_refused():
        assert len(backend.generate([request], Decoding(max_new_tokens=60))) == 1
