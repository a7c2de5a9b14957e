"""Weights change within responses of a real server: each token is of the version that its reply names."""

from collections import Counter

import pytest

from conformance.doubles.kept_responses import SampledResponses
from conformance.doubles.learner_side import connected, rendezvous, sync
from conformance.doubles.processes import stopped_when
from conformance.doubles.server_fixtures import num_restarted
from conformance.judge.servers.bounded import in_thread
from rollmatch.dialects.native.sender import NativeSender

pytestmark = pytest.mark.engine
LENGTH = 320  # one engine may have written 200 before another one begins


@pytest.fixture
def sender(server):
    """Writes in place, and stops the engines before its first byte: a slow machine has time for two updates."""
    made = NativeSender([connected(server.url)], rendezvous(), transport="direct", stage=False, keep=True)
    yield made
    made.close()


def grows_after(updating, server):
    """Whether responses have grown since the first question after the update's end."""
    counted = []

    def has_grown():
        counted.extend([server.health()["progress"]] if updating.done() else [])
        return counted and counted[-1] > counted[0]

    return has_grown


def versions_of(rollouts):
    return Counter(tuple(version for version, _ in rollout.policy_versions) for rollout in rollouts)


@pytest.mark.scenario(
    "weight-sync/two-updates-come-within-a-long-response",
    clauses=["weight-sync/a-sync-may-keep-responses-under-way#1,2,3", "weight-sync/no-request-sees-two-versions#1"],
)
def test_the_new_weights_write_the_rest_of_responses_under_way(instance, sender, policies, scene_requests):
    server = instance.server
    assert server.get("/native/identity")[1]["keep"] is True
    first = server.version + 1
    sender.send(policies[1].weights.items(), version=first)
    sampled = SampledResponses(instance, scene_requests, length=LENGTH)
    with sampled.held() as call:
        updating = in_thread(sender.send, policies[2].weights.items(), version=first + 1)
    with stopped_when(grows_after(updating, server), *instance.workers()):
        again = in_thread(sender.send, policies[0].weights.items(), version=first + 2)
    again.result()
    rollouts = call.result()
    weights_of = {first: policies[1].weights, first + 1: policies[2].weights, first + 2: policies[0].weights}
    sampled.check(rollouts, weights_of)
    assert (first, first + 1, first + 2) in versions_of(rollouts)  # an engine without processor time may be late
    later = sampled.write()
    assert {rollout.policy_versions for rollout in later} == {((first + 2, LENGTH),)}
    sampled.check(later, {first + 2: policies[0].weights})


@pytest.mark.scenario(clauses=["weight-sync/a-sync-may-keep-responses-under-way#4"])
def test_calls_of_other_dialects_begin_again_at_a_commit(instance, learner, policies, scene_requests):
    server = learner.server
    sampled = SampledResponses(instance, scene_requests, length=LENGTH)
    sync(learner, policies[1])
    first = server.version
    staged, choice = {"sync_id": "staged", "commit": False, "keep": True}, {"client": "learner", "sync_id": "staged"}
    assert learner.sync(policies[2].weights, version=first + 1, **staged)[0] == 200
    prompt = {"prompts": ["Say one to nine."] * 2, "max_tokens": LENGTH, "generation_kwargs": {"ignore_eos": True}}
    with sampled.held() as call:
        assert server.health()["running"] == len(sampled.requests)
        other = in_thread(server.post, "/generate/", prompt)
        while server.health()["running"] < len(sampled.requests) + 2:
            assert not other.done(), other.result()
        restarted, committing = num_restarted(server), in_thread(server.post, "/native/sync/commit/", choice)
        while num_restarted(server) < restarted + 2:
            assert not committing.done(), committing.result()
    rollouts, (status, body) = call.result(), committing.result()
    assert (status, body["policy_version"], other.result()[0]) == (200, first + 1, 200), body
    assert body["restarted"] == 2
    sampled.check(rollouts, {first: policies[1].weights, first + 1: policies[2].weights})
    assert versions_of(rollouts) == {(first, first + 1): len(rollouts)}
