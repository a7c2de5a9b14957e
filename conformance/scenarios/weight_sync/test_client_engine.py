"""The learner's client and a real server: after a sync, greedy rollouts are those of ``transformers``, float32."""

import pytest

from conformance.doubles.adapted_policy import adapted, expected_of, merged_copy
from conformance.doubles.digits import BRIEF, template_of, tokens_of
from conformance.doubles.learner_side import connected, rendezvous
from rollmatch.dialects.swift.client import SwiftDialect
from rollmatch.dialects.trl.client import TrlDialect
from rollmatch.dialects.trl.sender import TrlSender
from rollmatch.ranks import Ranks
from rollmatch.rollout.fence import SyncMode
from rollmatch.rollout.servers import VllmServerBackend
from rollmatch.weights.named_weights import named_weights

pytestmark = pytest.mark.engine


def test_greedy_rollouts_follow_every_full_sync(backend, policies, scene_requests):
    for policy in (policies[1], policies[2]):
        version = backend.policy_version + 1
        backend.push(policy.weights.items(), version=version)
        rollouts = backend.generate(scene_requests, BRIEF)
        assert tokens_of(rollouts) == policy.responses
        assert {rollout.policy_version for rollout in rollouts} == {version}
        assert [rollout.request_id for rollout in rollouts] == [r.request_id for r in scene_requests]
    assert backend.is_current()


@pytest.mark.scenario("weight-sync/greedy-output-follows-the-merged-model")
def test_greedy_output_follows_the_merged_model(backend, scene_requests):
    model = adapted(use_dora=True)
    backend.push(named_weights(model), version=backend.policy_version + 1)
    assert tokens_of(backend.generate(scene_requests, BRIEF)) == expected_of(merged_copy(model), scene_requests)


def test_an_adapter_alone_is_merged_by_the_server_bit_for_bit(backend, scene_requests):
    """Also the second one, which is announced by name."""
    mode = SyncMode("adapter", fallback_to_full=False)
    for seed in (1, 2):
        model = adapted(use_dora=seed == 2, seed=seed)
        assert mode.push(backend, named_weights(model), Ranks(), version=backend.policy_version + 1) == "adapter"
        assert tokens_of(backend.generate(scene_requests, BRIEF)) == expected_of(merged_copy(model), scene_requests)


def test_the_prompt_that_the_engine_saw_is_the_learners(backend, policies, scene_requests):
    backend.push(policies[0].weights.items(), version=backend.policy_version + 1)
    template = template_of()
    for request, rollout in zip(scene_requests, backend.generate(scene_requests, BRIEF), strict=True):
        prompt = template.expand(request.prompt_token_ids, template.image_features(request.sample))
        template.check_alignment(request.sample, prompt, rollout)


@pytest.mark.parametrize("kind", [SwiftDialect, pytest.param(TrlDialect, marks=pytest.mark.wide)])
def test_the_older_dialects_carry_weights_and_rollouts_too(instance, policies, scene_requests, kind):
    server = connected(instance.server.url)
    server.dialect = kind(server.base_url)  # the client would speak native to a server that knows it
    sender = TrlSender([server], [rendezvous()])
    backend = VllmServerBackend([server], template_of(), Ranks(), sender=sender)
    try:
        for policy in (policies[1], policies[2]):
            backend.push(policy.weights.items(), version=backend.policy_version + 1)
            assert tokens_of(backend.generate(scene_requests, BRIEF)) == policy.responses
    finally:
        backend.close()
