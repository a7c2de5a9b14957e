"""``rollmatch up`` on Ray's own cluster of several nodes: a run that loses a node, a server and its learner.

The nodes are real raylets on one machine with one CPU each, so that learner and server are on different nodes.
"""

import re
import signal
from contextlib import ExitStack
from itertools import chain
from types import SimpleNamespace

import psutil
import pytest

from conformance.cli.division import MATCHING, SMALL, named
from conformance.cli.started import cli_command, finish, journal_of, started
from conformance.cli.test_killed_server import in_session, wait_for_sync
from conformance.harness.judge import judge
from conformance.processes import is_healthy, stopped
from conformance.server.instance import free_port
from rollmatch.data import LearnerOrder, load_samples

pytestmark = pytest.mark.engine
STEPS, BATCH, SAVED_AT = 7, 3, 2
IN_SYNC, IN_LEARNING = 4, 6
"""Optimizer steps that have been packed when the server, and then the learner, is killed."""
STARTED = r"^\[{0}\] rollmatch up: {0}.* is process (\d+) on node (\w+)$"


@pytest.fixture(scope="module")
def nodes():
    """A head without room for commands, and two nodes for one each."""
    from ray.cluster_utils import Cluster  # a second; the tests that need none can do without

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # at loopback; whether this user's home has a token is no matter
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # else it looks for a head at 127.0.0.1 elsewhere
        local = {"node_ip_address": "127.0.0.1", "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **local})
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=1, **local)
            yield SimpleNamespace(cluster=cluster, add=lambda **other: cluster.add_node(num_cpus=1, **(local | other)))
        finally:
            cluster.shutdown()


def overrides_of(out, *, steps=STEPS):
    http = free_port()
    small = [override for override in SMALL if not override.startswith("training.save_steps")]
    return f"http://127.0.0.1:{http}", (
        *(*named(MATCHING, http, free_port()), *small),
        *(f"training.output_dir={out}", f"training.max_steps={steps}", f"training.save_steps={SAVED_AT}"),
        "custom.extra.rollout_server.vllm_data_parallel_size=null",
        "custom.extra.rollout_matching.vllm.server.retry_budget_s=200",
    )


def up(*overrides):
    """The command, in a process that is not forked: Ray reads the environment when it is imported."""
    return ["env", *cli_command("up", MATCHING, *overrides)]


def starts_of(running, name):
    """Process and node of each start of a part."""
    return re.findall(STARTED.format(name), running.output(), re.MULTILINE)


def now(running, name, num_starts):
    """Its process and node, once it was started for the nth time."""
    running.wait_until(lambda: len(starts_of(running, name)) >= num_starts)
    pid, node = starts_of(running, name)[-1]
    return psutil.Process(int(pid)), node


def left_of(running):
    """Processes that are left of a run's commands."""
    pids = [int(pid) for name in ("learner", "server-0") for pid, _ in starts_of(running, name)]
    return [process for pid in pids for process in in_session(pid)]


def steps_of(run, kind):
    return {event["step"] for event in journal_of(run.out, kind)}


def lose(nodes, node):
    """A node, as if its power were cut; known by the beginning of its id."""
    lost = next(one for one in nodes.cluster.worker_nodes if one.node_id.startswith(node))
    nodes.cluster.remove_node(lost, allow_graceful=False)


def lose_node_in_generation(run, running, nodes):
    """The server's, while a request is open: its engines stand still, so that the request cannot end before."""
    front, node = now(running, "server-0", 1)
    for step in range(1, IN_SYNC):
        running.wait_until(lambda step=step: step in steps_of(run, "requested"))
        with stopped(*front.children(recursive=True)):
            if step in steps_of(run, "generated"):
                continue  # the answer was faster than we
            lose(nodes, node)
            running.wait_until(lambda: not front.is_running())
        nodes.add()
        return step
    raise AssertionError("no request was open for long enough")


def lose_server_in_sync(run, running):
    front, run.second_node = now(running, "server-0", 2)
    running.wait_until(lambda: len(steps_of(run, "packed")) >= IN_SYNC)
    learner, _ = now(running, "learner", 1)
    with stopped(*front.children(recursive=True)):
        wait_for_sync(SimpleNamespace(out=run.out, url=run.url), as_running(running, learner), IN_SYNC)
        run.synced_before = [event["step"] for event in journal_of(run.out, "synced")]
        front.kill()
        running.wait_until(lambda: len(starts_of(running, "server-0")) > 2)


def as_running(running, process):
    """A part of a run where a running command is asked for."""
    return SimpleNamespace(wait_until=running.wait_until, process=process)


def lose_learner_in_learning(run, running):
    learner, _ = now(running, "learner", 1)
    running.wait_until(lambda: len(steps_of(run, "packed")) >= IN_LEARNING)
    learner.send_signal(signal.SIGKILL)
    now(running, "learner", 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory, nodes):
    """The whole story."""
    folder = tmp_path_factory.mktemp("up")
    run = SimpleNamespace(out=folder / "run")
    run.url, overrides = overrides_of(run.out)
    command = [*up(*overrides), "--address", nodes.cluster.address]
    with ExitStack() as stack:
        running = stack.enter_context(started(command, folder / "up.txt"))
        run.lost_at = lose_node_in_generation(run, running, nodes)
        lose_server_in_sync(run, running)
        lose_learner_in_learning(run, running)
        run.code, run.output = running.wait(), running.output()
        run.left = left_of(running)
        run.starts = {name: starts_of(running, name) for name in ("learner", "server-0")}
        yield run


@pytest.mark.scenario(
    "launchers/a-cluster-loses-a-node-a-server-and-the-learner",
    clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#3,5,9"],
)
def test_a_run_that_loses_a_node_a_server_and_its_learner_ends_well(run):
    assert run.code == 0, run.output[-3000:]
    assert {name: len(starts) for name, starts in run.starts.items()} == {"learner": 2, "server-0": 3}
    assert "server-0 is gone, with its actor or its node; restart 1 of 3" in run.output
    assert "server-0 was ended by signal 9; restart 2 of 3" in run.output
    assert "learner was ended by signal 9; restart 1 of 3" in run.output
    assert run.starts["server-0"][0][1] != run.starts["server-0"][1][1]
    assert run.starts["server-0"][1][1] == run.starts["server-0"][2][1]
    assert run.synced_before[-1] == IN_SYNC - 1


@pytest.mark.scenario(
    "launchers/a-cluster-loses-a-node-a-server-and-the-learner",
    clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#7"],
)
def test_no_sample_is_lost_or_seen_twice_and_versions_are_exact(run):
    order = list(LearnerOrder(len(load_samples(str(MATCHING.parent / "train.jsonl"))), seed=42))
    events = journal_of(run.out, None)
    assert judge(events) == []
    resumed = [event["resumed_from"] for event in events if event["event"] == "run"]
    assert resumed[0] is None
    assert resumed[1] in (IN_LEARNING - 2, IN_LEARNING)
    asked = [event for event in events if event["event"] == "requested" and event["purpose"] == "train"]
    begun = [*range(IN_LEARNING), *range(resumed[1], STEPS)]
    assert [event["step"] for event in asked] == begun
    packed = [event for event in events if event["event"] == "packed"]
    assert [event["step"] for event in packed] == begun
    for event in asked:
        assert event["sample_ids"] == order[event["step"] * BATCH :][:BATCH]
    for event in packed:
        assert sorted(chain.from_iterable(event["sample_ids"])) == sorted(order[event["step"] * BATCH :][:BATCH])


@pytest.mark.scenario(clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#8"])
def test_every_line_is_in_the_terminal_and_in_the_file_of_its_part(run):
    for name in ("learner", "server-0"):
        lines = (run.out / "logs" / f"{name}.txt").read_text().splitlines()
        assert lines
        assert [
            line.removeprefix(f"[{name}] ") for line in run.output.splitlines() if line.startswith(f"[{name}]")
        ] == lines


def test_nothing_of_the_run_is_left(run):
    """Commands and engines lead or join sessions of their own, below Ray's processes; theirs are gone, too."""
    assert not is_healthy(f"{run.url}/health/")
    assert run.left == []


@pytest.mark.scenario(
    "launchers/a-cluster-is-too-small", clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#11"]
)
def test_a_cluster_that_is_too_small_is_refused_with_its_numbers(tmp_path, nodes):
    _, overrides = overrides_of(tmp_path / "run")
    command = [*up(*overrides), "--address", nodes.cluster.address, "--servers", "9"]
    code, output = finish(command, tmp_path / "up.txt")
    assert code == 1
    assert re.search(r"\[cluster-too-small\] --servers: .* need 10 CPUs; 3 nodes have 2 CPUs", output), output
    assert not (tmp_path / "run").exists()


@pytest.mark.scenario(clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#6"])
def test_a_server_that_is_lost_too_often_ends_the_run(tmp_path, nodes):
    _, overrides = overrides_of(tmp_path / "run")
    command = [*up(*overrides), "--address", nodes.cluster.address, "--max-restarts", "0"]
    with started(command, tmp_path / "up.txt") as running:
        now(running, "server-0", 1)[0].kill()
        assert running.wait() == 1
        assert "[lost-too-often] --max-restarts: server-0 was ended by signal 9" in running.output()
        assert not left_of(running)


@pytest.mark.scenario(clauses=["launchers/one-command-runs-a-configuration-on-a-cluster#4"])
def test_a_server_that_comes_back_at_another_address_ends_the_run(tmp_path, nodes):
    url, overrides = overrides_of(tmp_path / "run")
    command = [*up(*overrides), "--address", nodes.cluster.address]
    with started(command, tmp_path / "up.txt") as running:
        _, node = now(running, "server-0", 1)
        assert url in running.output()
        lose(nodes, node)
        nodes.add(node_ip_address="127.0.0.2")
        assert running.wait() == 1
        assert "[server-moved] server-0 was at 127.0.0.1, and Ray now offers 127.0.0.2 only" in running.output()
        assert not left_of(running)
