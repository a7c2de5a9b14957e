"""A learner whose ranks run on two hosts, each with a rollout server, and the same learner on this machine.

The link has a delay and loses packets; it is cut for 20 s in the middle of a generation call and again in the middle of
a sync. The servers are doubles with a real HTTP server, a real gloo group and a small model; the learner is the command
that people type.
"""

import threading
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from conformance.doubles.answering_server import AnsweringServer
from conformance.doubles.digits import cut, load_model, template_of, write_cut
from conformance.doubles.division import BESIDE_DOUBLES, VLLM
from conformance.doubles.hosts import two_hosts
from conformance.doubles.http_server import http_server
from conformance.doubles.instance import free_port
from conformance.doubles.started import in_time, journal_of, journals_of, started, train_command
from conformance.tools.judge import judge
from rollmatch.config.connection import base_url_of

pytestmark = [pytest.mark.netns, pytest.mark.wide]
STEPS, CUT_S = 4, 20.0
CUT_CALL, CUT_SYNC = 2, 4
"""Versions: of the weights by which the first cut call is answered, and of the sync that the second cut falls into."""


class CuttingServer(AnsweringServer):
    """Notifies ``during`` of a call that has begun, before it is answered; answers one at a time."""

    def __init__(self, during):
        super().__init__(cut(load_model()), template_of())
        self.during, self._one = during, threading.Lock()

    def infer(self, body):
        self.during("infer", self.policy_version)
        with self._one:
            return super().infer(body)

    def receive(self, body):
        self.during("sync", body["version"])
        return super().receive(body)


class Cuts:
    """Cuts the link for ``CUT_S`` at the first call and the first sync of the chosen versions."""

    def __init__(self, link):
        self.link, self.done, self._lock = link, list[str](), threading.Lock()

    def __call__(self, name, version):
        with self._lock:
            if name in self.done or (name, version) not in (("infer", CUT_CALL), ("sync", CUT_SYNC)):
                return
            self.done.append(name)
            self.link.cut()
            threading.Thread(target=self._mend_later, daemon=True).start()

    def _mend_later(self):
        time.sleep(CUT_S)
        self.link.mend()


@pytest.fixture(scope="module")
def hosts():
    with two_hosts(delay_s=0.001, loss=0.01) as found:
        yield found


@contextmanager
def learned(folder, places, servers):
    """A run with a rank on each of ``places``, and servers: each a host, an address, its name, and a double.

    Yields journals, losses and weights.
    """
    model, out = write_cut(folder / "model"), folder / "run"
    with ExitStack() as stack:
        named = []
        for host, address, name, double in servers:
            with host.entered():
                url = stack.enter_context(http_server(double.answer, host=address)).url
            named.append(f"{{base_url: '{base_url_of(name, int(url.rpartition(':')[2]))}', group_port: {free_port()}}}")
        words = (
            *BESIDE_DOUBLES,
            f"training.max_steps={STEPS}",
            f"{VLLM}.server.servers=[{', '.join(named)}]",
            f"training.output_dir={out}",
        )
        endpoint, running, interface = f"{places[0].name}:{free_port()}", [], {"GLOO_SOCKET_IFNAME": ""}
        for rank, host in enumerate(places):
            flags = f"--nnodes {len(places)} --node-rank {rank} --rdzv-endpoint {endpoint} --gpus 0".split()
            command = train_command(*words, f"model.model={model}", flags=flags)
            log = folder / f"node{rank}.txt"
            running.append(stack.enter_context(started(host.command(*command), log, **interface)))
        codes = [node.wait() for node in running]
        assert codes == [0] * len(places), "\n".join(node.output()[-3000:] for node in running)
    yield SimpleNamespace(
        out=out,
        events=in_time(journals_of(out, num_ranks=2)),
        losses=[event["loss"] for event in journal_of(out, "step")],
        weights=load_file(out / f"checkpoint-{STEPS}" / "model.safetensors"),
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory, hosts, learned_on_one_host):
    """The run on this machine, and the run on two hosts, which lost the link twice."""
    a, b, link = hosts
    cuts = Cuts(link)
    apart = [(a, a.address, a.name, CuttingServer(cuts)), (b, b.address_v6, b.address_v6, CuttingServer(cuts))]
    with learned(tmp_path_factory.mktemp("apart"), (a, b), apart) as two:
        pass
    return learned_on_one_host, two, cuts, [double for *_, double in apart]


def of_rank(run, rank, kind):
    return [event for event in run.events if (event["rank"], event["event"]) == (rank, kind)]


@pytest.mark.scenario(
    "launchers/two-hosts-with-addresses-of-their-own",
    clauses=["launchers/a-learner-on-several-machines-is-started-by-torchrun-s-words#2,5"],
)
def test_a_run_across_two_hosts_equals_the_run_on_one(pair):
    one, two, cuts, _ = pair
    assert cuts.link.num_lost > 0
    assert len(two.losses) == STEPS
    assert two.losses == one.losses
    assert two.weights.keys() == one.weights.keys()
    assert all(torch.equal(tensor, one.weights[name]) for name, tensor in two.weights.items())
    for rank in (0, 1):
        asked = [
            [(event["sample_ids"], event["seeds"]) for event in of_rank(run, rank, "requested")] for run in pair[:2]
        ]
        assert asked[0] == asked[1]


@pytest.mark.scenario(
    "launchers/the-network-fails-for-20-seconds",
    clauses=["launchers/a-learner-on-several-machines-is-started-by-torchrun-s-words#6"],
)
def test_a_cut_of_20_s_in_a_call_and_in_a_sync_is_survived_and_nothing_is_mixed(pair):
    _, two, cuts, servers = pair
    assert cuts.done == ["infer", "sync"]
    assert cuts.link.num_cut > 0
    retried = [event for rank in (0, 1) for event in of_rank(two, rank, "retrying")]
    assert {event["code"] for event in retried if "server" in event} == {"server-died"}
    codes = {event["code"] for event in retried if event.get("purpose") == "sync"}
    assert "transfer-failed" in codes
    assert codes <= {"transfer-failed", "transport-failed", "call-timeout", "communicator-timeout"}
    assert of_rank(two, 0, "sync_repeated")[0]["version"] == CUT_SYNC + 1
    last = of_rank(two, 0, "synced")[-1]["version"]
    assert [server.policy_version for server in servers] == [last] * 2
    assert judge(two.events) == []
