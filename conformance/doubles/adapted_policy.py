"""The digits policy with adapters, and what it writes merged."""

from conformance.doubles.adapters import perturb_adapters
from conformance.doubles.digits import BRIEF, load_model, template_of, tokens_of
from conformance.doubles.learner_side import rendezvous
from rollmatch.config.training import TunerConfig
from rollmatch.dialects.trl.sender import TrlSender
from rollmatch.model.checkpoint import merged_weights
from rollmatch.ranks import Ranks
from rollmatch.rollout.adapter_proof import prove_adapters
from rollmatch.rollout.hf import HfBackend
from rollmatch.rollout.servers import VllmServerBackend
from rollmatch.weights.named_weights import named_weights

LANGUAGE = r"model\.language_model\..*\.(q_proj|v_proj|down_proj)"
TOWER = r"model\.visual\..*\.qkv"


def check_adapters_alone(server, requests):
    """The learner proves adapters, sends two, then all weights: the server writes what the merged policy writes."""
    policy = load_model(TunerConfig(train_type="lora", target_regex=LANGUAGE))
    backend = VllmServerBackend([server], template_of(), Ranks(), sender=TrlSender([server], [rendezvous()]))
    prove_adapters(backend, policy)
    for seed in (1, 2):
        perturb_adapters(policy, by=0.05, seed=seed)
        backend.push_adapter(named_weights(policy).adapter(), version=backend.policy_version + 1)
        written = tokens_of(backend.generate(requests, BRIEF))
        assert written == expected_of(merged_copy(policy), requests)
        assert written != expected_of(load_model(), requests)
    perturb_adapters(policy, by=0.05, seed=3)
    backend.push(named_weights(policy), version=backend.policy_version + 1)  # as where an adapter sync fails
    assert tokens_of(backend.generate(requests, BRIEF)) == expected_of(merged_copy(policy), requests)
    backend.close()


EVERYWHERE = r"model\.(visual|language_model)\..*\.(qkv|proj|linear_fc1|q_proj|v_proj|down_proj)"
"""Linear layers of the vision tower and of the language model."""


def adapted(*, use_dora, seed=1):
    """A policy whose adapters, the vision tower's too, change what it writes."""
    model = load_model(TunerConfig(train_type="lora", use_dora=use_dora, target_regex=EVERYWHERE))
    return perturb_adapters(model, seed=seed)


def merged_copy(model):
    """The same policy without adapters."""
    copy = load_model()
    copy.load_state_dict(dict(merged_weights(model)), strict=False)
    return copy


def expected_of(model, requests):
    return tokens_of(HfBackend(model, template_of(), batch_size=len(requests)).generate(requests, BRIEF))
