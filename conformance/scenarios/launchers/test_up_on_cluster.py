"""``rollmatch up`` on Ray's own cluster of several nodes: a run that loses nodes of servers and learner, and commands.

The nodes are real raylets on one machine with one CPU each, so that every command has a node of its own. They have the
machine's address: ranks on several nodes refuse servers at loopback.

The run is compared with one on a single node that loses nothing: what is learnt is the same, bit by bit. Therefore the
engine computes one request at a time and without its cache of prefixes: a sum over other requests beside it may differ
in its last bit.
"""

import re
from contextlib import ExitStack
from itertools import chain
from types import SimpleNamespace

import pytest
import requests
import torch
from safetensors.torch import load_file

from conformance.doubles.division import MATCHING, VLLM, typed
from conformance.doubles.killed_server import wait_for_sync
from conformance.doubles.processes import stopped
from conformance.doubles.ray_nodes import own_address, ray_nodes
from conformance.doubles.started import cli_command, finish, finish_ranks, in_time, journal_of, journals_of, started
from conformance.doubles.up_run import left_of, lose, now, overrides_of, starts_of, up
from conformance.tools.judge import judge
from rollmatch.data import LearnerOrder, load_samples

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]  # the story takes five minutes alone; waits have limits
STEPS, BATCH, SAVED_AT = 7, 6, 2
IN_SYNC, IN_LEARNING = 4, 6
"""Optimizer steps that have been packed when a node of the learner, and then its command on another, is lost."""
PARTS = ("learner-0", "learner-1", "server-0")
ALONE = (
    f"{VLLM}.max_num_seqs=1",
    f"{VLLM}.enable_prefix_caching=false",
    "custom.extra.rollout_matching.max_new_tokens=8",
)
"""One short request at a time, each computed as a whole."""


@pytest.fixture(scope="module")
def nodes():
    """A head without room for commands, and three nodes for one each."""
    with ray_nodes({"num_cpus": 1}, {"num_cpus": 1}, {"num_cpus": 1}, address=own_address()) as made:
        yield made


def steps_of(run, kind):
    """Those of which both ranks have written."""
    first, second = ({event["step"] for event in events} for events in journals_of(run.out, kind, num_ranks=2))
    return first & second


def lose_starting_server(run, running):
    """Its process, which costs little so early."""
    front, node = now(running, "server-0", 1)
    front.kill()
    assert now(running, "server-0", 2)[1] == node


def lose_node_in_generation(run, running, nodes):
    """The server's, while a request is open: its engines stand still, so that the request cannot end before."""
    front, node = now(running, "server-0", 2)
    for step in range(1, IN_SYNC):
        running.wait_until(lambda step=step: step in steps_of(run, "requested"))
        with stopped(*front.children(recursive=True)):
            if step in steps_of(run, "generated"):
                continue  # the answer was faster than we
            lose(nodes, node)
            running.wait_until(lambda: not front.is_running())
        nodes.add()
        return
    raise AssertionError("no request was open for long enough")


def lose_learner_node_in_sync(run, running, nodes):
    """The second one, which has no part in the sync but waits for its end."""
    front, _ = now(running, "server-0", 3)
    running.wait_until(lambda: len(steps_of(run, "packed")) >= IN_SYNC)
    (launcher, _), (other, node) = (now(running, name, 1) for name in ("learner-0", "learner-1"))
    rank = next(each for each in launcher.children(recursive=True) if each.environ().get("RANK") == "0")
    with stopped(*front.children(recursive=True)):
        wait_for_sync(
            SimpleNamespace(out=run.out, url=run.url),
            SimpleNamespace(wait_until=running.wait_until, process=rank),
            IN_SYNC,
        )
        run.synced_before = [event["step"] for event in journal_of(run.out, "synced")]
        family = other.children(recursive=True)
        with stopped(*family):  # what a cut of power leaves no time to save
            lose(nodes, node)
            for each in family:
                each.kill()
        running.wait_until(lambda: not other.is_running())
    nodes.add()


def lose_learner_in_learning(run, running):
    """The command on its first node. Its rank, which holds the run directory, must not outlive it."""
    now(running, "learner-1", 2)
    running.wait_until(lambda: len(steps_of(run, "packed")) >= IN_LEARNING)
    now(running, "learner-0", 2)[0].kill()
    for name in PARTS[:2]:
        now(running, name, 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory, nodes):
    """The whole story."""
    folder = tmp_path_factory.mktemp("up")
    http, overrides = overrides_of(folder / "run", *ALONE, steps=STEPS, saved_at=SAVED_AT)
    run = SimpleNamespace(out=folder / "run", url=f"http://{own_address()}:{http}")
    command = [*up(*overrides), "--address", nodes.cluster.address, "--learners", "2", "--learner-nodes", "2"]
    with ExitStack() as stack:
        running = stack.enter_context(started(command, folder / "up.txt", GLOO_SOCKET_IFNAME=""))
        lose_starting_server(run, running)
        lose_node_in_generation(run, running, nodes)
        lose_learner_node_in_sync(run, running, nodes)
        lose_learner_in_learning(run, running)
        run.code, run.output = running.wait(), running.output()
        run.left = left_of(running)
        run.starts = {name: starts_of(running, name) for name in PARTS}
        yield run


@pytest.mark.wide
@pytest.mark.scenario(
    "launchers/a-cluster-loses-nodes-and-commands-of-servers-and-learner",
    clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#3,5,6,10"],
)
def test_a_run_that_loses_nodes_and_commands_ends_well(run):
    assert run.code == 0, run.output[-3000:]
    assert {name: len(starts) for name, starts in run.starts.items()} == dict.fromkeys(PARTS, 3)
    assert "server-0 was ended by signal 9; restart 1 of 3" in run.output
    assert "server-0 is gone, with its actor or its node; restart 2 of 3" in run.output
    # Ray, the command on the lost node or the other one: who notices first is left to chance
    assert re.search(r"rollmatch up: learner-[01] .*; restart 1 of 3", run.output)
    assert run.starts["learner-1"][0][1] != run.starts["learner-1"][1][1]
    assert "learner-0 was ended by signal 9; restart 2 of 3" in run.output
    assert len({node for name in PARTS for _, node in run.starts[name]}) == 5
    assert run.synced_before[-1] == IN_SYNC - 1


@pytest.mark.wide
@pytest.mark.scenario(
    "launchers/a-cluster-loses-nodes-and-commands-of-servers-and-learner",
    clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#8"],
)
def test_no_sample_is_lost_or_seen_twice_and_versions_are_exact(run):
    order = list(LearnerOrder(len(load_samples(str(MATCHING.parent / "train.jsonl"))), seed=42))
    ranks = journals_of(run.out, num_ranks=2)
    assert judge(in_time(ranks)) == []
    resumed = [event["resumed_from"] for event in ranks[0] if event["event"] == "run"]
    assert resumed[0] is None
    assert resumed[1:] in ([IN_SYNC, IN_LEARNING - 2], [IN_SYNC, IN_LEARNING])
    begun = [*range(IN_SYNC), *range(resumed[1], IN_LEARNING), *range(resumed[2], STEPS)]
    for kind in ("requested", "packed"):
        each = [[event for event in events if event["event"] == kind] for events in ranks]
        each = [[event for event in events if event.get("purpose") != "eval"] for events in each]
        assert [[event["step"] for event in events] for events in each] == [begun, begun]
        for events in zip(*each, strict=True):
            seen = list(chain.from_iterable(event["sample_ids"] for event in events))
            seen = seen if kind == "requested" else list(chain.from_iterable(seen))
            assert sorted(seen) == sorted(order[events[0]["step"] * BATCH :][:BATCH])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same run on one node: two ranks, started as torchrun does, and a server."""
    folder = tmp_path_factory.mktemp("one")
    _, overrides = overrides_of(folder / "run", *ALONE, steps=STEPS, saved_at=SAVED_AT)
    with started(typed("serve", MATCHING, "0", overrides), folder / "server.txt"):
        finish_ranks(folder, 2, *cli_command("train", MATCHING, *overrides))
    return SimpleNamespace(out=folder / "run")


def learned(run):
    """Of each rank: requests and losses, as sets, in which a step that was repeated and is the same counts once."""
    journals = journals_of(run.out, num_ranks=2)
    requested = [[event for event in events if event["event"] == "requested"] for events in journals]
    return SimpleNamespace(
        requests=[
            {(event["step"], event["purpose"], *event["sample_ids"], *event["seeds"]) for event in events}
            for events in requested
        ],
        losses=[
            {(event["step"], event["loss"]) for event in events if event["event"] == "step"} for events in journals
        ],
        weights=load_file(run.out / f"checkpoint-{STEPS}" / "model.safetensors"),
    )


@pytest.mark.wide
@pytest.mark.scenario(
    "launchers/learner-ranks-on-two-nodes", clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#16"]
)
def test_ranks_on_two_nodes_learn_what_they_learn_on_one(run, undisturbed):
    """In every step, whether it was made once or again after a loss."""
    two, one = learned(run), learned(undisturbed)
    assert two.requests == one.requests
    assert two.losses == one.losses
    assert [len(losses) for losses in two.losses] == [STEPS, STEPS]
    assert two.weights.keys() == one.weights.keys()
    assert all(torch.equal(tensor, one.weights[name]) for name, tensor in two.weights.items())
    start = load_file(MATCHING.parents[2] / "fixtures/models/digits/model.safetensors")
    assert any(not torch.equal(tensor, two.weights[name]) for name, tensor in start.items())


@pytest.mark.wide
@pytest.mark.scenario(clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#9"])
def test_every_line_is_in_the_terminal_and_in_the_file_of_its_part(run):
    for name in PARTS:
        lines = (run.out / "logs" / f"{name}.txt").read_text().splitlines()
        assert lines
        assert [
            line.removeprefix(f"[{name}] ") for line in run.output.splitlines() if line.startswith(f"[{name}]")
        ] == lines


@pytest.mark.wide
def test_nothing_of_the_run_is_left(run):
    """Commands and engines lead or join sessions of their own, below Ray's processes; theirs are gone, too."""
    assert run.left == []
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{run.url}/health/", timeout=10)


@pytest.mark.wide
@pytest.mark.scenario(
    "launchers/a-cluster-is-too-small", clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#12"]
)
def test_a_cluster_that_is_too_small_is_refused_with_its_numbers(tmp_path, nodes):
    _, overrides = overrides_of(tmp_path / "run", steps=STEPS)
    command = [*up(*overrides), "--address", nodes.cluster.address, "--servers", "9"]
    code, output = finish(command, tmp_path / "up.txt")
    assert code == 1
    assert re.search(r"\[cluster-too-small\] --servers: .* need 10 CPUs; 4 nodes have 3 CPUs", output), output
    assert not (tmp_path / "run").exists()


@pytest.mark.wide
@pytest.mark.scenario(clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#7"])
def test_a_server_that_is_lost_too_often_ends_the_run(tmp_path, nodes):
    _, overrides = overrides_of(tmp_path / "run", steps=STEPS)
    command = [*up(*overrides), "--address", nodes.cluster.address, "--max-restarts", "0"]
    with started(command, tmp_path / "up.txt") as running:
        now(running, "server-0", 1)[0].kill()
        assert running.wait() == 1
        assert "[lost-too-often] --max-restarts: server-0 was ended by signal 9" in running.output()
        assert not left_of(running)


@pytest.mark.wide
@pytest.mark.scenario(clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#4"])
def test_a_server_that_comes_back_at_another_address_ends_the_run(tmp_path, nodes):
    http, overrides = overrides_of(tmp_path / "run", steps=STEPS)
    command = [*up(*overrides), "--address", nodes.cluster.address, "--learner-nodes", "2"]  # no node is spare
    with started(command, tmp_path / "up.txt") as running:
        _, node = now(running, "server-0", 1)
        assert f"http://{own_address()}:{http} is" in running.output()
        lose(nodes, node)
        nodes.add(node_ip_address="127.0.0.2")
        assert running.wait() == 1
        assert f"[server-moved] server-0 was at {own_address()}, and Ray now offers 127.0.0.2 only" in running.output()
        assert not left_of(running)
