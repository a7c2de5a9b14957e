"""Weights change within responses of a real server: each token is of the version that its reply names."""

from collections import Counter
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from conformance.doubles.digits import load_model, template_of
from conformance.doubles.learner_side import sync
from conformance.doubles.logprobs import TOLERANCE, found_in
from conformance.doubles.server_fixtures import under_way
from conformance.judge.servers.bounded import in_thread
from rollmatch.data.ids import pack_ids, unpack_ids
from rollmatch.records import Rollout

pytestmark = pytest.mark.engine
LENGTH = 300
PER_SCENE = 2


class SampledResponses:
    """Long responses to scenes with images, sampled at temperature 1, with log-probabilities."""

    def __init__(self, server, requests):
        self.server, self.requests = server, [request for request in requests for _ in range(PER_SCENE)]

    def write(self):
        """Their rollouts by the native dialect; the ends of turns are tokens like others."""
        batch = [
            {
                "request_id": str(place),
                "prompt_token_ids": pack_ids(request.prompt_token_ids),
                "images": [Path(request.sample.images[0]).read_bytes()],
                "seed": place + 1,
            }
            for place, request in enumerate(self.requests)
        ]
        sampling = {"max_tokens": LENGTH, "temperature": 1.0, "ignore_eos": True, "logprobs": True}
        sampling["logit_bias"] = dict.fromkeys(template_of().banned_ids, -100.0)
        status, body = self.server.post_packed("/native/infer/", {"requests": batch, "sampling": sampling})
        assert status == 200, body
        return [self.rollout(answer) for answer in body["responses"]]

    def rollout(self, answer):
        return Rollout(
            request_id=answer["request_id"],
            prompt_token_ids=tuple(unpack_ids(answer["prompt_token_ids"]).tolist()),
            response_token_ids=tuple(unpack_ids(answer["response_token_ids"]).tolist()),
            stop_id=None,
            policy_version=answer["policy_version"],
            response_logprobs=tuple(np.frombuffer(answer["logprobs"], "<f4").tolist()),
            version_runs=tuple(map(tuple, answer["policy_versions"])),
        )

    def errors(self, rollouts, policy):
        """[responses, tokens] distance of each log-probability from transformers' by the policy's weights.

        transformers reads the whole response at once: keys and values of all tokens are of these weights, too.
        """
        model = load_model()
        model.load_state_dict(policy.weights, strict=False)
        found = found_in(model, self.requests, rollouts, temperature=1.0)
        return np.abs(np.array(found) - np.array([rollout.response_logprobs for rollout in rollouts]))

    def interrupted_by(self, update):
        """The rollouts of a call in whose midst ``update`` ran, and what that returned."""
        call = under_way(self.server, self.write, num_tokens=len(self.requests))
        updated = update()
        return call.result(), updated


def check_tokens(sampled, rollouts, policy_of):
    """Every token was sampled from the weights of the version that is named for it.

    Many tokens beside a change are not of the version on its other side: a count that is off by one would show.
    """
    own, other = [], []
    errors = {version: sampled.errors(rollouts, policy) for version, policy in policy_of.items()}
    for place, rollout in enumerate(rollouts):
        versions, lengths = zip(*rollout.policy_versions, strict=True)
        assert sum(lengths) == len(rollout.response_token_ids) == LENGTH
        assert list(versions) == sorted(set(versions))
        assert rollout.policy_version == versions[0]
        ends = list(accumulate(lengths))
        own += [errors[v][place, end - n : end].max() for v, end, n in zip(versions, ends, lengths, strict=True)]
        for before, after, end in zip(versions, versions[1:], ends, strict=False):
            other += [errors[after][place, end - 1], errors[before][place, end]]
    assert max(own) < TOLERANCE
    assert not other or np.mean(np.array(other) > TOLERANCE) > 0.25


@pytest.mark.scenario(
    "weight-sync/two-updates-come-within-a-long-response",
    clauses=[
        "weight-sync/a-sync-may-keep-responses-under-way#1,2,3,4",
        "weight-sync/no-request-sees-two-versions#1",
    ],
)
def test_the_new_weights_write_the_rest_of_responses_under_way(learner, policies, scene_requests):
    server = learner.server
    assert server.get("/native/identity")[1]["keep"] is True
    sampled = SampledResponses(server, scene_requests)
    sync(learner, policies[1])
    first = server.version
    staged, choice = {"sync_id": "staged", "commit": False, "keep": True}, {"client": "learner", "sync_id": "staged"}
    assert learner.sync(policies[2].weights, version=first + 1, **staged)[0] == 200
    prompt = {"prompts": ["Say one to nine."] * 2, "max_tokens": 300, "generation_kwargs": {"ignore_eos": True}}

    def update():
        other = in_thread(server.post, "/generate/", prompt)
        while server.health()["running"] < len(sampled.requests) + 2:
            assert not other.done(), other.result()
        committed = server.post("/native/sync/commit/", choice)
        assert learner.sync(policies[0].weights, version=first + 2, keep=True)[0] == 200
        return committed, other

    rollouts, ((status, body), other) = sampled.interrupted_by(update)
    assert (status, body["policy_version"], other.result()[0]) == (200, first + 1, 200), body
    assert body["restarted"] == 2, "calls of other dialects have one version"
    check_tokens(sampled, rollouts, {first: policies[1], first + 1: policies[2], first + 2: policies[0]})
    counted = Counter(tuple(version for version, _ in rollout.policy_versions) for rollout in rollouts)
    assert counted == {(first, first + 1, first + 2): len(rollouts)}, counted
    later = sampled.write()
    assert {rollout.policy_versions for rollout in later} == {((first + 2, LENGTH),)}
    check_tokens(sampled, later, {first + 2: policies[0]})
