"""Rollout servers that join and leave while ``rollmatch train`` runs on two ranks, beside the same run on one server.

The servers are doubles with a real HTTP server, a real gloo group and a small model; the learner is the command that
people type, in two processes as torchrun starts them.
"""

import json
import os
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from conformance.doubles.answering_server import AnsweringServer
from conformance.doubles.digits import cut, load_model, template_of, write_cut
from conformance.doubles.division import BESIDE_DOUBLES, VLLM
from conformance.doubles.instance import free_port
from conformance.doubles.native_double import serving
from conformance.doubles.started import finish_ranks, in_time, journal_of, journals_of, train_command
from conformance.tools.judge import judge

STEPS = 4


class CountingServer(AnsweringServer):
    """Answers one call at a time, and notes by which version; ``called`` gets each before it is answered."""

    def __init__(self):
        super().__init__(cut(load_model()), template_of())
        self.called, self.one, self.versions = lambda version: None, threading.Lock(), {}

    def infer(self, body):
        self.called(self.policy_version)
        with self.one:
            self.versions |= {request["request_id"]: self.policy_version for request in body["requests"]}
            return super().infer(body)


class ServersFile:
    """The list, replaced as a whole whenever a version first answers a call."""

    def __init__(self, path, entries, lists):
        """``lists``: version -> indices of ``entries``; 0 stands before the start."""
        self.path, self.entries, self.lists, self.lock = path, entries, lists, threading.Lock()
        self.write(0)

    def write(self, version):
        with self.lock:
            if (indices := self.lists.pop(version, None)) is not None:
                new = self.path.with_suffix(".new")
                new.write_text(json.dumps([self.entries[index] for index in indices]))
                os.replace(new, self.path)


def learned(folder, num_servers, lists):
    """A run whose list holds ``lists[version]`` from the first call by that version on."""
    model, out = write_cut(folder / "model"), folder / "run"
    servers = [CountingServer() for _ in range(num_servers)]
    with ExitStack() as stack:
        urls = stack.enter_context(serving(*servers))
        entries = [{"base_url": url, "group_port": free_port()} for url in urls]
        listed = ServersFile(folder / "servers.json", entries, lists)
        for server in servers:
            server.called = listed.write
        words = (
            *BESIDE_DOUBLES,
            f"training.max_steps={STEPS}",
            f"{VLLM}.server.servers_file={listed.path}",
            f"training.output_dir={out}",
        )
        finish_ranks(folder, 2, *train_command(*words, f"model.model={model}"))
    return SimpleNamespace(
        urls=urls,
        servers=servers,
        output=(folder / "rank0.txt").read_text(),
        events=in_time(journals_of(out, num_ranks=2)),
        moves=[
            (event["event"], event["server"], event["num_present"])
            for event in journal_of(out, None)
            if event["event"] in ("server_joined", "server_left")
        ],
        losses=[event["loss"] for event in journal_of(out, "step")],
        weights=load_file(out / f"checkpoint-{STEPS}" / "model.safetensors"),
    )


@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    """The second server is listed in step 0, the first one is not from step 1 on: the next syncs follow."""
    return learned(tmp_path_factory.mktemp("elastic"), 2, {0: [0], 1: [0, 1], 2: [1]})


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
