"""Weights change within responses of a real server: each token is of the version that its reply names."""

from collections import Counter

import pytest

from conformance.doubles.kept_responses import SampledResponses
from conformance.doubles.learner_side import sync
from conformance.doubles.processes import stopped
from conformance.judge.servers.bounded import in_thread

pytestmark = pytest.mark.engine
LENGTH = 440


@pytest.mark.scenario(
    "weight-sync/two-updates-come-within-a-long-response",
    clauses=[
        "weight-sync/a-sync-may-keep-responses-under-way#1,2,3,4",
        "weight-sync/no-request-sees-two-versions#1",
    ],
)
def test_the_new_weights_write_the_rest_of_responses_under_way(instance, learner, policies, scene_requests):
    server = learner.server
    assert server.get("/native/identity")[1]["keep"] is True
    sampled = SampledResponses(server, scene_requests, length=LENGTH)
    sync(learner, policies[1])
    first = server.version
    staged, choice = {"sync_id": "staged", "commit": False, "keep": True}, {"client": "learner", "sync_id": "staged"}
    assert learner.sync(policies[2].weights, version=first + 1, **staged)[0] == 200
    prompt = {"prompts": ["Say one to nine."] * 2, "max_tokens": LENGTH, "generation_kwargs": {"ignore_eos": True}}

    def update():
        with stopped(*instance.workers()):
            other = in_thread(server.post, "/generate/", prompt)
            while server.health()["running"] < len(sampled.requests) + 2:
                assert not other.done(), other.result()
        committed = server.post("/native/sync/commit/", choice)
        assert learner.sync(policies[0].weights, version=first + 2, keep=True)[0] == 200
        return committed, other

    rollouts, ((status, body), other) = sampled.interrupted_by(update)
    assert (status, body["policy_version"], other.result()[0]) == (200, first + 1, 200), body
    assert body["restarted"] == 2, "calls of other dialects have one version"
    weights_of = {first: policies[1].weights, first + 1: policies[2].weights, first + 2: policies[0].weights}
    sampled.check(rollouts, weights_of)
    counted = Counter(tuple(version for version, _ in rollout.policy_versions) for rollout in rollouts)
    assert counted == {(first, first + 1, first + 2): len(rollouts)}, counted
    later = sampled.write()
    assert {rollout.policy_versions for rollout in later} == {((first + 2, LENGTH),)}
    sampled.check(later, {first + 2: policies[0].weights})
