"""Capability ``weight-sync``, scenario by scenario; what needs a server is pending."""

import copy

import pytest
import torch

from conformance.doubles.adapters import perturb_adapters
from conformance.doubles.configs import LONG, config_with, refusal_of
from conformance.doubles.digits import load_model, perturb, requests_for, scenes, template_of, tokens_of
from conformance.doubles.engine import make_remembering_backend
from conformance.doubles.refusals import refused
from conformance.doubles.small_run import events, make_trainer
from rollmatch.config.training import TunerConfig
from rollmatch.model.checkpoint import merged_weights
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.hf import HfBackend

SHORT = Decoding(max_new_tokens=7)


@pytest.fixture(scope="module")
def model():
    """Not to be changed."""
    return load_model()


@pytest.mark.scenario(
    "weight-sync/two-steps-with-accumulation",
    clauses=[
        "weight-sync/fresh-rollouts-come-from-the-newest-weights#1,2,3,4",
        "weight-sync/every-sync-has-a-version-and-is-proven#1",
    ],
)
def test_two_steps_with_accumulation(tmp_path):
    overrides = ("max_steps=2", "gradient_accumulation_steps=4", "per_device_train_batch_size=1")
    brief = "custom.extra.rollout_matching.max_new_tokens=5"
    found = brief, *(f"training.{each}" for each in overrides)
    trainer = make_trainer(tmp_path, *found, eval_samples=scenes()[:1], is_shallow=True)
    trainer.train()
    trainer.evaluate()
    found = [e for name in ("synced", "requested", "generated") for e in events(trainer, name)]
    order = [(e["event"], e["step"]) for e in sorted(found, key=lambda e: (e["time"], e["step"]))]
    assert [step for event, step in order if event == "synced"] == [0, 1, 2]
    for step in (0, 1, 2):
        assert order.index(("synced", step)) < order.index(("requested", step))
    assert [(e["step"], e["version"]) for e in events(trainer, "synced")] == [(0, 1), (1, 2), (2, 3)]
    assert [(e["step"], e["policy_version"]) for e in events(trainer, "generated")] == [(0, 1), (1, 2), (2, 3)]
    trainer.evaluate()
    assert len(events(trainer, "synced")) == 3


@pytest.mark.scenario(
    "weight-sync/a-colocated-engine-is-not-older-than-the-model",
    "weight-sync/an-engine-without-weights-refuses",
    clauses=["weight-sync/fresh-rollouts-come-from-the-newest-weights#1,5", "weight-sync/weights-travel-in-memory#1"],
)
def test_an_engine_that_remembers_is_not_older_than_the_model(model, monkeypatch):
    """The engine is a double; the real one answers in conformance/scenarios/rollout_backends/test_vllm_colocate.py."""
    requests = requests_for(scenes()[:2])
    backend = make_remembering_backend(model, template_of(), Ranks(), monkeypatch)
    with refused("rollout-before-sync"):
        backend.generate(requests, SHORT)
    backend.push(merged_weights(model), version=1)
    before = backend.generate(requests, SHORT)
    assert [rollout.policy_version for rollout in before] == [1, 1]
    changed = copy.deepcopy(model)
    perturb(changed, seed=1, scale=0.3)
    expected = HfBackend(changed, template_of(), batch_size=2).generate(requests, SHORT)
    assert tokens_of(expected) != tokens_of(before)
    backend.push(merged_weights(changed), version=2)
    after = backend.generate(requests, SHORT)
    assert tokens_of(after) == tokens_of(expected)
    assert {rollout.policy_version for rollout in after} == {2}


@pytest.mark.scenario(
    "weight-sync/greedy-output-follows-the-merged-model",
    clauses=[
        "weight-sync/full-sync-sends-every-weight-merged#1,2",
        "weight-sync/adapter-sync-sends-adapters-only#2",
        "configuration/a-policy-is-trained-whole-or-by-adapters#5",
    ],
)
@pytest.mark.parametrize("use_dora", [False, True])
def test_full_sync_carries_the_merged_weights_and_leaves_the_model(model, use_dora):
    policy = load_model(TunerConfig(train_type="lora", use_dora=use_dora, lora_rank=4))
    perturb_adapters(policy, named="lora_B", by=0.05)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    sent = {name: tensor.clone() for name, tensor in merged_weights(policy)}
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())
    assert sent.keys() == {name for name, _ in model.named_parameters()}
    merged = policy.merge_and_unload()
    own = dict(merged.named_parameters())
    assert any(not torch.equal(sent[name], weight) for name, weight in model.named_parameters())
    assert all(torch.equal(sent[name], own[name]) for name in sent)
    assert refusal_of("~.vllm.sync.mode=half") == ("not-a-choice", f"{LONG}vllm.sync.mode")


@pytest.mark.scenario(clauses=["weight-sync/a-failed-adapter-sync-falls-back-once-and-for-all#1"])
@pytest.mark.parametrize(("overrides", "is_on"), [((), True), (("~.vllm.sync.fallback_to_full=false",), False)])
def test_the_fallback_is_on_unless_switched_off(overrides, is_on):
    assert config_with(*overrides).custom.extra.rollout_matching.vllm.sync.fallback_to_full is is_on
