"""Capability ``decoding``, scenario by scenario."""

import sys
from types import SimpleNamespace

import pytest

from conformance.scenarios.configs import LONG, config_with, not_refused, problem_of, problems_of, refusal_of
from rollmatch.cli.assemble import _make_decoding
from rollmatch.ranks import Ranks
from rollmatch.records import RolloutRequest, Sample
from rollmatch.rollout import vllm_colocate
from rollmatch.rollout.backend import Decoding

BEAM = ("~.decode_mode=beam", "~.num_beams=4")


def accepted(*overrides):
    """The rollout settings of a config, which fails the test when it is refused."""
    with not_refused():
        return config_with(*overrides).custom.extra.rollout_matching


@pytest.mark.scenario(
    "decoding/beam-search-on-vllm-is-refused", clauses=["decoding/decoding-is-greedy-unless-told-otherwise#2"]
)
def test_beam_search_on_vllm_is_refused():
    assert refusal_of(*BEAM, "~.rollout_backend=vllm") == ("beam-needs-hf", f"{LONG}decode_mode")


@pytest.mark.scenario(
    "decoding/beam-search-on-hf-is-accepted", clauses=["decoding/decoding-is-greedy-unless-told-otherwise#1,3"]
)
def test_beam_search_on_hf_is_accepted():
    rollout = accepted(*BEAM, "~.rollout_backend=hf")
    assert (rollout.decode_mode, rollout.num_beams) == ("beam", 4)
    assert accepted().decode_mode == "greedy"
    sampled = refusal_of(*BEAM, "~.rollout_backend=hf", "~.decoding.temperature=0.1")
    assert sampled == ("beam-sampled", f"{LONG}decoding.temperature")


@pytest.mark.scenario(
    "decoding/a-limit-that-leaves-no-room-is-refused", clauses=["decoding/a-response-leaves-room-for-its-prompt#1,2,3"]
)
def test_a_limit_that_leaves_no_room_is_refused():
    assert refusal_of("global_max_length=512", "~.max_new_tokens=512") == ("response-too-long", "global_max_length")
    engine = refusal_of("global_max_length=1024", "~.vllm.max_model_len=1025")
    assert engine == ("engine-longer-than-segment", f"{LONG}vllm.max_model_len")


@pytest.mark.scenario(
    "decoding/a-limit-that-leaves-room-is-accepted", clauses=["decoding/a-response-leaves-room-for-its-prompt#1,3"]
)
def test_a_limit_that_leaves_room_is_accepted():
    rollout = accepted("global_max_length=1024", "~.max_new_tokens=512", "~.vllm.max_model_len=1024")
    assert rollout.max_new_tokens == 512 == accepted().max_new_tokens


@pytest.mark.scenario(
    "decoding/defaults-decode-greedily", clauses=["decoding/sampling-is-configured-under-decoding#1,2,3,4"]
)
def test_defaults_decode_greedily():
    decoding = _make_decoding(accepted())
    assert (decoding.temperature, decoding.top_p, decoding.top_k) == (0, 1.0, -1)


@pytest.mark.scenario(
    "decoding/a-negative-temperature-is-refused", clauses=["decoding/sampling-is-configured-under-decoding#2,5"]
)
def test_a_negative_temperature_is_refused():
    assert refusal_of("~.decoding.temperature=-0.1") == ("out-of-range", f"{LONG}decoding.temperature")


@pytest.mark.scenario(
    "decoding/a-top-p-of-zero-is-refused", clauses=["decoding/sampling-is-configured-under-decoding#3,5"]
)
def test_a_top_p_of_zero_is_refused():
    assert refusal_of("~.decoding.top_p=0") == ("out-of-range", f"{LONG}decoding.top_p")


@pytest.mark.scenario(
    "decoding/a-top-k-of-zero-is-refused", clauses=["decoding/sampling-is-configured-under-decoding#4,5"]
)
def test_a_top_k_of_zero_is_refused():
    assert refusal_of("~.decoding.top_k=0") == ("out-of-range", f"{LONG}decoding.top_k")


@pytest.mark.scenario(
    "decoding/the-ends-of-the-ranges-are-accepted", clauses=["decoding/sampling-is-configured-under-decoding#2,3,4"]
)
def test_the_ends_of_the_ranges_are_accepted():
    decoding = accepted("~.decoding={temperature: 0, top_p: 1.0, top_k: 1}").decoding
    assert (decoding.temperature, decoding.top_p, decoding.top_k) == (0, 1.0, 1)


@pytest.mark.scenario("decoding/a-flat-temperature-is-refused", clauses=["decoding/flat-decoding-keys-are-refused#1,2"])
def test_a_flat_temperature_is_refused():
    problem = problem_of("~.temperature=0.7")
    assert (problem.code, problem.key) == ("removed-key", f"{LONG}temperature")
    assert f"{LONG}decoding.temperature" in problem.remedy


@pytest.mark.scenario(
    "decoding/two-flat-keys-give-two-problems", clauses=["decoding/flat-decoding-keys-are-refused#1,2"]
)
def test_two_flat_keys_give_two_problems():
    problems = problems_of("~.top_p=0.9", "~.top_k=5")
    assert sorted((problem.code, problem.key) for problem in problems) == [
        ("removed-key", f"{LONG}top_k"),
        ("removed-key", f"{LONG}top_p"),
    ]
    assert all(problem.key.rpartition(".")[2] in problem.remedy for problem in problems)


@pytest.mark.scenario("decoding/the-value-in-its-new-place-is-accepted")
def test_the_value_in_its_new_place_is_accepted():
    assert accepted("~.decoding.temperature=0.7").decoding.temperature == 0.7


@pytest.mark.scenario(
    "decoding/beam-search-with-one-beam-is-refused", clauses=["decoding/decoding-is-greedy-unless-told-otherwise#4"]
)
def test_beam_search_with_one_beam_is_refused():
    told = refusal_of("~.decode_mode=beam", "~.num_beams=1", "~.rollout_backend=hf")
    assert told == ("beams-disagree", f"{LONG}num_beams")
    assert refusal_of("~.num_beams=2") == told


@pytest.mark.scenario(
    "decoding/sampled-beams-are-refused", clauses=["decoding/decoding-is-greedy-unless-told-otherwise#3"]
)
def test_sampled_beams_are_refused():
    told = refusal_of(*BEAM, "~.rollout_backend=hf", "~.decoding.temperature=0.7")
    assert told == ("beam-sampled", f"{LONG}decoding.temperature")


@pytest.mark.scenario(
    "decoding/an-engine-that-outgrows-a-segment-is-refused",
    clauses=["decoding/a-response-leaves-room-for-its-prompt#3"],
)
def test_an_engine_that_outgrows_a_segment_is_refused():
    told = refusal_of("global_max_length=1024", "~.vllm.max_model_len=2048")
    assert told == ("engine-longer-than-segment", f"{LONG}vllm.max_model_len")


@pytest.mark.scenario("decoding/an-engine-as-long-as-a-segment-is-accepted")
def test_an_engine_as_long_as_a_segment_is_accepted():
    assert accepted("global_max_length=1024", "~.vllm.max_model_len=1024").vllm.max_model_len == 1024


@pytest.mark.scenario(
    "decoding/an-engine-without-room-for-a-prompt-is-refused",
    clauses=["decoding/a-response-leaves-room-for-its-prompt#4"],
)
def test_an_engine_without_room_for_a_prompt_is_refused():
    told = refusal_of("global_max_length=1024", "~.vllm.max_model_len=512", "~.max_new_tokens=512")
    assert told == ("response-too-long", f"{LONG}vllm.max_model_len")


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
    template = SimpleNamespace(vocabulary=vocabulary, banned_ids=(), load_images=lambda sample: [])
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
