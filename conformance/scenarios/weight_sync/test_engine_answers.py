"""What a real engine answers after an update, a refused one, and one of the weights that it has."""

import pytest
import torch

from conformance.doubles.adapted_policy import expected_of
from conformance.doubles.digits import (
    BRIEF,
    LONG_QUESTION,
    load_model,
    perturb,
    requests_for,
    scenes,
    template_of,
    tokens_of,
)
from conformance.doubles.refusals import refused
from rollmatch.weights.named_weights import named_weights

pytestmark = pytest.mark.engine


def changed(seed):
    model = load_model()
    perturb(model, seed=seed, scale=0.05)
    return model


def push(backend, model):
    backend.push(named_weights(model), version=backend.policy_version + 1)


@pytest.mark.scenario(
    "weight-sync/a-cached-prompt-is-computed-again", clauses=["weight-sync/caches-of-old-weights-are-emptied#1"]
)
def test_a_cached_prompt_is_computed_again(backend):
    """Over several blocks of the engine's cache; each replica has answered it before, its images too."""
    requests = requests_for(scenes()[:2] * 3, template=template_of(LONG_QUESTION))
    assert len(requests[0].prompt_token_ids) > 128
    written = []
    for model in (changed(5), changed(6)):
        push(backend, model)
        expected = expected_of(model, requests)
        for _ in range(2):
            assert tokens_of(backend.generate(requests, BRIEF)) == expected
        written.append(expected)
    assert all(before != after for before, after in zip(*written, strict=True))


@pytest.mark.scenario("weight-sync/a-sync-of-unchanged-weights-changes-nothing")
def test_a_sync_of_unchanged_weights_changes_nothing(backend, scene_requests):
    model = changed(7)
    push(backend, model)
    before = backend.generate(scene_requests, BRIEF)
    push(backend, model)
    after = backend.generate(scene_requests, BRIEF)
    assert tokens_of(after) == tokens_of(before) == expected_of(model, scene_requests)
    assert {one.policy_version for one in after} == {before[0].policy_version + 1}


@pytest.mark.scenario(
    "weight-sync/a-wrong-shape-leaves-the-old-weights",
    "weight-sync/the-right-shape-is-accepted",
    clauses=["weight-sync/a-wrong-update-is-refused-and-named#1"],
)
def test_a_wrong_shape_leaves_the_old_weights_and_the_right_one_is_accepted(
    instance, backend, policies, scene_requests, scene_batch, greedy
):
    old, new = policies[1], policies[2]
    backend.push(old.weights.items(), version=backend.policy_version + 1)
    version = backend.policy_version
    name = next(name for name in new.weights if name.endswith("q_proj.weight"))
    wrong = new.weights | {name: torch.cat([new.weights[name]] * 2)}
    with refused("tensor-shape-mismatch", name):
        backend.push(wrong.items(), version=version + 1)
    responses, versions = instance.server.infer(scene_batch, **greedy)[:2]
    assert old.wrote(responses)
    assert set(versions) == {version}
    backend.push(new.weights.items(), version=version + 1)
    assert tokens_of(backend.generate(scene_requests, BRIEF)) == new.responses
