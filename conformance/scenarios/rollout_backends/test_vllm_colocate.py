"""The engine in the learner's process against the learner's own generate(), in float32, token for token."""

import copy
import dataclasses
from contextlib import contextmanager

import pytest
import torch

from conformance.doubles.adapters import perturb_adapters
from conformance.doubles.digits import GREEDY, LONG_QUESTION, load_model, perturb, requests_for, scenes, template_of
from conformance.doubles.digits import tokens_of as tokens
from conformance.doubles.logprobs import TOLERANCE, farthest_apart, figures_of
from conformance.doubles.refusals import refused
from rollmatch.config.training import TunerConfig
from rollmatch.model.checkpoint import merged_weights
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.hf import HfBackend

pytestmark = pytest.mark.engine
WIDE = pytest.mark.wide

SAMPLED = Decoding(max_new_tokens=48, temperature=1.0)
SHORT = Decoding(max_new_tokens=32)
PERTURBATION = 0.3
"""Of a weight's spread: most scenes are then answered otherwise."""


@pytest.fixture
def engine(engine_backend, sdpa_model):
    """The engine with the digits model's own weights."""
    push(engine_backend, sdpa_model)
    return engine_backend


@pytest.fixture(scope="module")
def long_requests():
    return requests_for(scenes()[:8], template=template_of(LONG_QUESTION))


def push(backend, model):
    backend.push(merged_weights(model), version=backend.policy_version + 1)


@contextmanager
def unsynced(backend):
    """The engine as it is before its first push."""
    version, backend.policy_version = backend.policy_version, 0
    try:
        yield
    finally:
        backend.policy_version = version


def ids_of(rollouts):
    """All but the version, which a backend of its own counts."""
    return [dataclasses.replace(rollout, policy_version=0) for rollout in rollouts]


def hf_rollouts(model, requests, decoding=GREEDY):
    return HfBackend(model, template_of(), batch_size=16).generate(requests, decoding)


def num_different(some, others):
    return sum(a != b for a, b in zip(tokens(some), tokens(others), strict=True))


def test_no_rollout_before_the_engine_holds_the_learners_weights(engine_backend, sdpa_model, requests_16):
    with unsynced(engine_backend), refused("rollout-before-sync", "policy_version"):
        engine_backend.generate(requests_16[:1], GREEDY)
    push(engine_backend, sdpa_model)
    assert len(engine_backend.generate(requests_16[:1], GREEDY)) == 1


@pytest.mark.scenario(
    "rollout-backends/eight-scenes-decoded-by-both-backends",
    clauses=["rollout-backends/both-backends-agree-under-greedy-decoding#1"],
)
def test_greedy_rollouts_equal_generate_token_for_token(engine, requests_16, greedy_16):
    assert ids_of(engine.generate(requests_16, GREEDY)) == ids_of(greedy_16)


@pytest.mark.parametrize(
    "part", [pytest.param("every weight", marks=pytest.mark.wide), "vision tower", "language model"]
)
def test_changed_weights_answer_the_same_images_and_long_prompts_anew(part, engine, sdpa_model, long_requests):
    original = engine.generate(long_requests, SHORT)
    assert min(len(rollout.prompt_token_ids) for rollout in original) > 256
    changed = copy.deepcopy(sdpa_model)
    inner = changed.model
    module = {"every weight": changed, "vision tower": inner.visual, "language model": inner.language_model}[part]
    perturb(module, seed=1, scale=PERTURBATION)
    expected = hf_rollouts(changed, long_requests, SHORT)
    assert num_different(expected, original) > 4
    push(engine, changed)
    assert ids_of(engine.generate(long_requests, SHORT)) == ids_of(expected)
    push(engine, sdpa_model)
    assert tokens(engine.generate(long_requests, SHORT)) == tokens(original)


def test_the_tied_head_follows_the_embedding(engine, sdpa_model, requests_16):
    changed = copy.deepcopy(sdpa_model)
    assert changed.get_output_embeddings().weight is changed.get_input_embeddings().weight
    perturb(changed.get_input_embeddings(), seed=2, scale=PERTURBATION)
    assert "lm_head.weight" not in dict(merged_weights(changed))
    push(engine, changed)
    assert ids_of(engine.generate(requests_16, GREEDY)) == ids_of(hf_rollouts(changed, requests_16))
    inside = engine._engine.apply_model(lambda m: m.language_model.lm_head.weight.detach().clone())[0]
    expected = changed.get_output_embeddings().weight
    assert torch.equal(inside[: len(expected)], expected)


def test_a_push_leaves_the_learners_weights_alone_and_copies_them(engine, sdpa_model, requests_16):
    mine = copy.deepcopy(sdpa_model)
    before = {name: weight.clone() for name, weight in mine.state_dict().items()}
    push(engine, mine)
    assert all(torch.equal(weight, before[name]) for name, weight in mine.state_dict().items())
    first = engine.generate(requests_16[:4], GREEDY)
    perturb(mine, seed=3, scale=PERTURBATION)  # the learner steps on; the engine gets none of it
    assert engine.generate(requests_16[:4], GREEDY) == first


def check_weights(engine, expected):
    """Bit for bit, also where the engine keeps several weights as one."""
    inside = engine._engine.apply_model(lambda m: {name: w.detach().clone() for name, w in m.named_parameters()})[0]
    for layer in range(5):
        ours, theirs = f"model.language_model.layers.{layer}.", f"language_model.model.layers.{layer}."
        for fused, parts in {
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "self_attn.o_proj": ("self_attn.o_proj",),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.down_proj": ("mlp.down_proj",),
        }.items():
            weight = torch.cat([expected[f"{ours}{part}.weight"] for part in parts])
            assert torch.equal(inside[f"{theirs}{fused}.weight"], weight), f"{theirs}{fused}"


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_adapters_arrive_merged(use_dora, engine, requests_16, greedy_16):
    torch.manual_seed(5)
    tuner = TunerConfig(train_type="lora", use_dora=use_dora, lora_rank=4, lora_alpha=16)
    policy = perturb_adapters(load_model(tuner), named="lora_B", by=0.05)
    expected = hf_rollouts(policy, requests_16)
    assert num_different(expected, greedy_16) > 8
    push(engine, policy)
    check_weights(engine, dict(merged_weights(policy)))
    assert ids_of(engine.generate(requests_16, GREEDY)) == ids_of(expected)


def test_sampling_is_repeatable_per_seed_whoever_stands_beside_it(engine, requests_16):
    first = engine.generate(requests_16, SAMPLED)
    assert engine.generate(requests_16, SAMPLED) == first
    shuffled = [requests_16[place] for place in (5, 0, 3, 9)]
    assert engine.generate(shuffled, SAMPLED) == [first[place] for place in (5, 0, 3, 9)]
    assert engine.generate(requests_16[7:8], SAMPLED) == first[7:8]
    other = engine.generate(requests_for(scenes()[:16], run_seed=8), SAMPLED)
    assert tokens(other) != tokens(first)


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=WIDE), 0.7])
def test_log_probabilities_are_those_of_the_sampled_distribution(temperature, engine, requests_16, sdpa_model):
    parameters = dataclasses.replace(SAMPLED, temperature=temperature, logprobs=True)
    rollouts = engine.generate(requests_16[:8], parameters)
    assert {rollout.finish_reason for rollout in rollouts} <= {"stop", "length"}
    assert farthest_apart(sdpa_model, requests_16[:8], rollouts, temperature=temperature) < TOLERANCE
    assert farthest_apart(sdpa_model, requests_16[:8], rollouts, temperature=temperature + 0.3) > TOLERANCE
    figures = figures_of(sdpa_model, requests_16[:8], rollouts, temperature=temperature)
    assert figures["correction_mean"] == pytest.approx(1, abs=TOLERANCE)
    assert figures["drift"] < TOLERANCE


def test_log_probabilities_are_vllms_own_to_the_last_bit(engine, requests_16):
    """Kept in the engine's core, and sent with the end of each response; some are not to be kept, and stop earlier."""
    from vllm import SamplingParams

    parameters = dataclasses.replace(SAMPLED, logprobs=True)
    rollouts = engine.generate(requests_16, parameters)
    fields = {"max_tokens": 48, **parameters.values(), "stop_token_ids": sorted(engine.template.vocabulary.stop_ids)}
    bias = dict.fromkeys(engine.template.banned_ids, -100.0)
    rules = [SamplingParams(seed=r.seed, logit_bias=bias, logprobs=0, **fields) for r in requests_16]
    images = [engine.template.load_images(request.sample) for request in requests_16]
    prompts = [
        {"prompt_token_ids": list(request.token_ids), "multi_modal_data": {"image": each}}
        for request, each in zip(requests_16, images, strict=True)
    ]
    own = [output.outputs[0] for output in engine._engine.generate(prompts, rules, use_tqdm=False)]
    for rollout, answer in zip(rollouts, own, strict=True):
        ids = list(answer.token_ids)
        expected = [place[token_id].logprob for place, token_id in zip(answer.logprobs, ids, strict=True)]
        assert tuple(rollout.response_token_ids) == tuple(ids[: len(rollout.response_token_ids)])
        assert list(rollout.response_logprobs) == expected


def test_stops_are_trimmed_and_length_is_reported(engine, requests_16, template, monkeypatch):
    """The stop is a token that the model does write, wherever it does."""
    few = Decoding(max_new_tokens=7)
    whole = engine.generate(requests_16, few)
    assert [len(rollout.response_token_ids) for rollout in whole if rollout.finish_reason == "length"]
    stop_id = whole[0].response_token_ids[3]
    monkeypatch.setattr(template.vocabulary, "stop_ids", {stop_id})
    stopped = engine.generate(requests_16, few)
    for before, after in zip(whole, stopped, strict=True):
        response = before.response_token_ids
        cut = response.index(stop_id) if stop_id in response else None
        assert after.response_token_ids == response[:cut]
        assert after.finish_reason == (before.finish_reason if cut is None else "stop")
    assert stopped[0].finish_reason == "stop"


def test_placeholders_of_images_are_never_sampled(engine, requests_16, sdpa_model, template, monkeypatch):
    """A row of the tied embedding that no prompt shows is made the likeliest first token: the image's own."""
    changed = copy.deepcopy(sdpa_model)
    states = []
    changed.get_output_embeddings().register_forward_pre_hook(lambda head, inputs: states.append(inputs[0][0, -1]))
    first_token = Decoding(max_new_tokens=1)
    HfBackend(changed, template, batch_size=1).generate(requests_16[:1], first_token)
    with torch.no_grad():
        changed.get_input_embeddings().weight[template.image_id] = 40 * states[0] / states[0].square().sum()
    push(engine, changed)
    expected = tokens(engine.generate(requests_16[:1], first_token))
    assert expected[0][0] not in template.banned_ids
    assert expected == tokens(HfBackend(changed, template, batch_size=1).generate(requests_16[:1], first_token))
    monkeypatch.setattr(template, "banned_ids", ())
    assert tokens(engine.generate(requests_16[:1], first_token)) == [(template.image_id,)]


def test_a_prompt_that_too_long_for_its_response_is_refused(engine, requests_16):
    """Placeholders count once per merged patch, as the engine sees them."""
    request = requests_16[0]
    expanded = engine.template.expand(request.prompt_token_ids, engine.template.image_features(request.sample))
    assert len(expanded) > len(request.prompt_token_ids)
    left = engine.settings.max_model_len - len(expanded)
    with refused("prompt-too-long", "custom.extra.rollout_matching.vllm.max_model_len") as caught:
        engine.generate([request], Decoding(max_new_tokens=left + 1))
    assert request.sample.origin in caught.value.problem
    assert len(engine.generate([request], Decoding(max_new_tokens=left))) == 1
