"""Streams while updates come one after another, as the campaign's attack, on a real engine."""

import random
import time
from collections import Counter

import pytest

from conformance.doubles.server_fixtures import HELD_S, MOST_OF_TURNS, turns_of
from conformance.tools.campaign.streams import READERS, StreamRead, stream_over_updates, wrong_in

UPDATE_S = 20.0
"""Far above what an update takes beside streams on a busy machine, far below what the streams would take."""


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.scenario(clauses=["server-dialects/the-openai-dialect-serves-openai-clients#4,5"])
def test_streams_over_updates_are_of_one_version_and_delay_none(server, learner, policies):
    def sync(weights):
        version = server.version + 1
        return learner.sync(weights, version=version, sync_id=f"streams {version}")[0]

    before = turns_of(server)
    both = [policy.weights for policy in policies[1:]]
    streams, seconds, wrong = stream_over_updates(server, sync, both, num_updates=6, chance=random.Random(5))
    assert not wrong, wrong
    assert {stream.reader for stream in streams} == set(READERS)
    ends = Counter(stream.end for stream in streams)
    assert ends["policy-changed"], ends
    assert max(seconds) < UPDATE_S
    turns = {limit: count - before[limit] for limit, count in turns_of(server).items()}
    assert turns[HELD_S] >= MOST_OF_TURNS * turns[float("inf")], turns
    deadline = time.monotonic() + 20
    while server.health()["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_is_wrong_with_a_stream_is_found():
    references = {1: {"a": [[1, 2]] * 8}, 2: {"a": [[3, 4]] * 8}}

    def wrong(*events, end="whole"):
        stream = StreamRead("a", "whole", end=end)
        for version, ids in events:
            stream.take(
                {
                    "policy_version": version,
                    "choices": [{"index": i, "policy_version": version, "token_ids": ids} for i in range(8)],
                }
            )
        return {problem.partition(":")[0] for problem in wrong_in(stream, references)}

    assert wrong((1, [1]), (1, [2])) == set()
    assert wrong((1, [1]), end="policy-changed") == set()
    assert wrong((1, [1]), (2, [2])) == {"mixed"}
    assert wrong((2, [1, 2])) == wrong((1, [1])) == {"mislabelled"}
    assert wrong((1, [1]), end="closed") == {"a stream of a caller that reads whole ended with closed"}
