"""``rollmatch up``: nodes of rollout servers that are lost while the weights of a sync are on their way to them.

The engine that receives the weights is stopped with some of them in its socket: the sender can neither end nor fail
before the node is lost.
"""

import shutil
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.nn.functional import pad

from conformance.doubles.digits import MODEL, load_model
from conformance.doubles.division import MATCHING
from conformance.doubles.processes import START_TIMEOUT_S, stopped_when
from conformance.doubles.ray_nodes import own_address, ray_nodes
from conformance.doubles.started import journal_of, started
from conformance.doubles.up_run import left_of, lose, now, overrides_of, starts_of, up
from conformance.tools.judge import judge
from rollmatch.data import LearnerOrder, load_samples

pytestmark = [pytest.mark.engine, pytest.mark.wide]
STEPS, BATCH = 3, 3
SERVERS = ("server-0", "server-1")
WIDTH = 4096
"""Of the layers' widest weights: 25 MB in all."""
HELD_BYTES = 2**18
"""In the socket of an engine: only weights are as many."""


def write_wide(folder):
    """The digits model with units that compute nothing, which are sent all the same; returns its directory."""
    model = load_model().to(torch.bfloat16)
    more = WIDTH - model.config.text_config.intermediate_size
    for layer in model.model.language_model.layers:
        for name, sides in (("gate_proj", (0, 0, 0, more)), ("up_proj", (0, 0, 0, more)), ("down_proj", (0, more))):
            projection = getattr(layer.mlp, name)
            projection.weight = torch.nn.Parameter(pad(projection.weight.data, sides))
    model.config.text_config.intermediate_size = WIDTH
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.save_pretrained(folder)
    return folder


def ports_of(processes):
    """Local ones of their connections."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found |= {connection.laddr.port for connection in process.net_connections("tcp")}
    return found


def waiting_bytes(ports):
    """The most that waits in one socket at these ports, on its way in, as the kernel counts it."""
    most = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, _, queues, *_ = line.split()
        if int(local.partition(":")[2], 16) in ports:
            most = max(most, int(queues.partition(":")[2], 16))
    return most


def lose_in_transfer(run, running, nodes, name):
    """A server's node, with weights in the sockets of its engine, which does not take them."""
    front, node = now(running, name, 1)
    num_synced = len(run.synced())
    running.wait_until(lambda: len(journal_of(run.out, "packed")) > num_synced)  # the next sync follows
    engines = front.children(recursive=True)
    ports, deadline = ports_of(engines), time.monotonic() + START_TIMEOUT_S

    def are_on_their_way():
        """25 MB do not come within one turn of the engine."""
        assert time.monotonic() < deadline, "no transfer was seen"
        return waiting_bytes(ports) >= HELD_BYTES

    with stopped_when(are_on_their_way, *engines):
        run.lost_after.append(run.synced()[-1]["step"])
        lose(nodes, node)
        for each in engines:  # whom a cut of power leaves no time to leave the group
            each.kill()
        running.wait_until(lambda: not front.is_running())
    nodes.add()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Each of two servers loses its node: the one that holds the group's store, then the other."""
    folder, node = tmp_path_factory.mktemp("up"), {"num_cpus": 1}
    _, overrides = overrides_of(folder / "run", steps=STEPS)
    more = (f"model.model={write_wide(folder / 'wide')}", f"training.save_steps={STEPS}")
    run = SimpleNamespace(out=folder / "run", lost_after=[], synced=lambda: journal_of(folder / "run", "synced"))
    with ray_nodes(node, node, node, address=own_address()) as nodes:
        command = [*up(*overrides, *more), "--address", nodes.cluster.address, "--servers", "2"]
        with started(command, folder / "up.txt", GLOO_SOCKET_IFNAME="") as running:
            for name in SERVERS:
                lose_in_transfer(run, running, nodes, name)
            run.code, run.output = running.wait(), running.output()
            run.left = left_of(running)
            run.starts = {name: len(starts_of(running, name)) for name in ("learner", *SERVERS)}
            yield run


@pytest.mark.scenario("launchers/a-cluster-loses-nodes-of-servers-in-a-sync")
def test_servers_whose_nodes_are_lost_in_a_sync_come_back(run):
    assert run.code == 0, run.output[-3000:]
    assert run.starts == {"learner": 1, "server-0": 2, "server-1": 2}
    for name in SERVERS:
        assert f"{name} is gone, with its actor or its node; restart 1 of 3" in run.output
    assert run.left == []


@pytest.mark.scenario("launchers/a-cluster-loses-nodes-of-servers-in-a-sync")
def test_the_broken_sync_is_repeated_as_a_newer_version_that_all_servers_take(run):
    events = journal_of(run.out, None)
    assert judge(events) == []
    repeated = [(event["step"], event["version"]) for event in events if event["event"] == "sync_repeated"]
    assert sorted({step for step, _ in repeated}) == [step + 1 for step in run.lost_after]
    assert [event["step"] for event in run.synced()] == list(range(STEPS + 1))
    version, answered = 0, []
    for event in events:
        if event["event"] == "synced":
            version = event["version"]
        if event["event"] == "called":
            assert event["policy_versions"] == [version]
            answered.append((version, event["server"]))
    assert version == STEPS + 1 + len(repeated)
    versions = {event["version"] for event in run.synced()}
    assert len(set(answered)) == len(versions) * len(SERVERS), "each server wrote by each version"


@pytest.mark.scenario("launchers/a-cluster-loses-nodes-of-servers-in-a-sync")
def test_every_sample_is_learnt_once_in_its_order(run):
    order = list(LearnerOrder(len(load_samples(str(MATCHING.parent / "train.jsonl"))), seed=42))
    wanted = [order[step * BATCH :][:BATCH] for step in range(STEPS)]
    requested = [event for event in journal_of(run.out, "requested") if event["purpose"] == "train"]
    assert [event["sample_ids"] for event in requested] == wanted
    assert [event["sample_ids"] for event in journal_of(run.out, "packed")] == [[ids] for ids in wanted]
