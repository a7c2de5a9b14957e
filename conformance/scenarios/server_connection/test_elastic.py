"""Rollout servers that join and leave while ``rollmatch train`` runs on two ranks, beside the same run on one server.

The servers are doubles with a real HTTP server, a real gloo group and a small model; the learner is the command that
people type, in two processes as torchrun starts them.
"""

import pytest
import torch

from conformance.doubles.elastic import STEPS, learned
from conformance.tools.judge import judge


@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    """The second server is listed in step 0, the first one is not from step 1 on: the next syncs follow."""
    return learned(tmp_path_factory.mktemp("elastic"), 2, {0: [0], 1: [0, 1], 2: [1]})


@pytest.mark.slow
@pytest.mark.scenario(
    "server-connection/one-server-joins-and-another-leaves",
    clauses=["server-connection/servers-join-and-leave-a-running-job#1,3,4,6,7"],
)
def test_a_run_whose_servers_come_and_go_equals_one_with_a_server_that_stays(learned_on_one_host, elastic):
    fixed = learned_on_one_host
    first, second = elastic.urls
    assert elastic.moves == [("server_joined", second, 2), ("server_left", first, 1)]
    assert fixed.moves == []
    assert first in elastic.output
    assert len(elastic.losses) == STEPS
    assert elastic.losses == fixed.losses
    assert elastic.weights.keys() == fixed.weights.keys()
    assert all(torch.equal(tensor, fixed.weights[name]) for name, tensor in elastic.weights.items())
    stayed, went, came = fixed.servers[0], *elastic.servers
    assert went.answered | came.answered == stayed.answered
    assert len(went.answered) + len(came.answered) == len(stayed.answered)


AHEAD = ("custom.extra.rollout_matching.overlap=ahead", "training.packing=false")


@pytest.mark.wide
@pytest.mark.scenario(
    "server-connection/servers-join-and-leave-while-the-learner-learns",
    clauses=["server-connection/servers-join-and-leave-a-running-job#3,5,6,7"],
)
def test_servers_come_and_go_while_the_learner_learns(tmp_path):
    """Windows on their way when a server leaves were requested of it; those behind are divided again."""
    fixed = learned(tmp_path / "fixed", 1, {0: [0]}, *AHEAD)
    moving = learned(tmp_path / "moving", 2, {0: [0], 1: [0, 1], 2: [1]}, *AHEAD)
    first, second = moving.urls
    assert moving.moves == [("server_joined", second, 2), ("server_left", first, 1)]
    assert moving.losses == fixed.losses
    assert all(torch.equal(tensor, fixed.weights[name]) for name, tensor in moving.weights.items())
    stayed, went, came = fixed.servers[0], *moving.servers
    assert went.versions | came.versions == stayed.versions
    assert (set(went.versions.values()), set(came.versions.values())) == ({1, 2}, {2, 3, 5}), (
        "the last step's window was requested one step before"
    )
    assert (went.policy_version, went.group) == (2, None)


@pytest.mark.slow
@pytest.mark.scenario(clauses=["server-connection/servers-join-and-leave-a-running-job#3,4,5,6"])
def test_every_rollout_is_of_the_version_that_the_step_expects(learned_on_one_host, elastic):
    assert judge(elastic.events) == []
    went, came = elastic.servers
    assert went.versions | came.versions == learned_on_one_host.servers[0].versions
    assert (set(went.versions.values()), set(came.versions.values())) == ({1, 2}, {2, 3, 4, 5})
    assert (went.policy_version, came.policy_version) == (2, 5)
    assert went.group is None
    calls = [name for name, _ in came.calls if name in ("sync", "infer")]
    assert calls[0] == "sync"
    sizes = [body["world_size"] for name, body in came.calls if name == "communicator"]
    assert sizes == [3, 2]  # with the learner
