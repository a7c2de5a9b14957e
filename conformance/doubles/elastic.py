"""A run of two ranks whose list of servers changes while it learns."""

import json
import os
import threading
from contextlib import ExitStack
from types import SimpleNamespace

from safetensors.torch import load_file

from conformance.doubles.answering_server import AnsweringServer
from conformance.doubles.digits import cut, load_model, template_of, write_cut
from conformance.doubles.division import BESIDE_DOUBLES, VLLM
from conformance.doubles.instance import free_port
from conformance.doubles.native_double import serving
from conformance.doubles.started import finish_ranks, in_time, journal_of, journals_of, train_command

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


def learned(folder, num_servers, lists, *overrides):
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
            *overrides,
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
