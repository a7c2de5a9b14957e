"""Divisions of a machine with doubles for engines: in a second, what a run on real ones shows in a minute."""

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from conformance.doubles.answering_server import AnsweringServer
from conformance.doubles.digits import load_model, template_of
from conformance.doubles.division import MATCHING
from conformance.doubles.instance import free_port
from conformance.doubles.killed_server import in_session
from conformance.doubles.learner_side import native_backend
from conformance.doubles.native_double import NativeDouble, serving
from conformance.doubles.records import make_request
from conformance.doubles.small_run import events, make_trainer
from conformance.doubles.started import cli_command, started
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding

VLLM = "custom.extra.rollout_matching.vllm"
SERVED = "custom.extra.rollout_server"
STEPS = 3
ENGINES = ("vllm", "rollmatch.rollout.vllm_colocate", "rollmatch.server.replica")


class NoEngines:
    """Finds what only engines need, notes that it was asked for, and hands out something empty."""

    def __init__(self):
        self.asked = []

    def find_spec(self, name, path=None, target=None):
        if not name.startswith(ENGINES):
            return None
        self.asked.append(name)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return ModuleType(spec.name)

    def exec_module(self, module):
        pass


@pytest.fixture
def engines(monkeypatch):
    """Modules of engines that are asked for from now on; none is loaded."""
    for name in [name for name in sys.modules if name.startswith(ENGINES)]:
        monkeypatch.delitem(sys.modules, name)
    finder = NoEngines()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    yield finder.asked
    for name in finder.asked:
        sys.modules.pop(name, None)


@pytest.fixture
def learn(tmp_path):
    """Three servers and a learner of so many steps; the trainer, and the servers."""
    with ExitStack() as stack:

        def learnt(num_steps):
            servers = [AnsweringServer(load_model(), template_of()) for _ in range(3)]
            named = ", ".join(
                f"{{base_url: {url}, group_port: {free_port()}}}" for url in stack.enter_context(serving(*servers))
            )
            trainer = make_trainer(
                tmp_path,
                "custom.extra.rollout_matching.rollout_backend=vllm",
                "custom.extra.rollout_matching.max_new_tokens=4",
                *(f"{VLLM}.max_model_len=512", f"{VLLM}.mode=server", f"{VLLM}.server.servers=[{named}]"),
                *("training.per_device_train_batch_size=3", f"training.max_steps={num_steps}"),
            )
            stack.enter_context(closing(trainer))
            trainer.train()
            return trainer, servers

        yield learnt


@pytest.mark.scenario("topologies/one-optimizer-step-on-three-and-one", "rollout-backends/server-mode-starts-no-engine")
def test_three_servers_write_and_the_learner_loads_no_engine(engines, learn):
    trainer, servers = learn(1)
    assert engines == []
    assert [len(server.answered) for server in servers] == [1, 1, 1]
    assert [event["version"] for event in events(trainer, "synced")] == [1]
    assert [server.policy_version for server in servers] == [1, 1, 1]
    assert trainer.state.log_history[0]["grad_norm"] > 0


@pytest.mark.scenario("topologies/three-and-one-on-a-laptop")
def test_each_step_learns_from_rollouts_of_its_own_version(learn):
    trainer, _ = learn(STEPS)
    assert [(event["step"], event["version"]) for event in events(trainer, "synced")] == [
        (step, step + 1) for step in range(STEPS)
    ]
    written = [(event["step"], event["policy_version"]) for event in events(trainer, "generated")]
    assert written == [(step, step + 1) for step in range(STEPS)]


@pytest.mark.scenario(
    "vineppo/two-processes-do-not-wait-for-each-other-at-the-rendezvous",
    "vineppo/a-sync-in-the-middle-of-two-processes",
)
def test_two_ranks_ask_and_one_of_them_joins_the_group():
    double, weights = NativeDouble({"a": torch.zeros(2)}), [("a", torch.ones(2))]
    with serving(double) as (url,), ExitStack() as stack:
        backends = [stack.enter_context(closing(backend_of(url, rank))) for rank in (0, 1)]
        for version in (1, 2):
            for backend in backends:
                backend.push(weights, version=version)
            with ThreadPoolExecutor() as ranks:
                replies = list(ranks.map(ask, backends))
            assert [reply.policy_version for reply in replies] == [version, version]
    assert [body["world_size"] for name, body in double.calls if name == "communicator"] == [2]


def backend_of(url, rank):
    return native_backend(url, ranks=Ranks(rank=rank, learner_world_size=2), timeout_s=5, join_timeout_s=3)


def ask(backend):
    (rollout,) = backend.generate([make_request(prompt_token_ids=(1, 2, 3))], Decoding(max_new_tokens=4))
    return rollout


SERVER_WITH_TWO_WORKERS = f"""#!{sys.executable}
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has its background jobs ignore
up, down = os.pipe()
for _ in range(2):
    if not os.fork():
        os.write(down, b".")
        time.sleep(60)
        os._exit(0)
for _ in range(2):
    os.read(up, 1)  # Python forgets a signal that comes while it forks, so nobody is interrupted before that
try:
    print("serving", flush=True)
    signal.pause()
finally:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.killpg(0, signal.SIGINT)
"""
"""Ends its workers when it is interrupted, as servers do."""


@pytest.mark.scenario("launchers/an-interrupt-leaves-no-orphans")
def test_an_interrupt_of_the_launcher_ends_the_server_and_its_workers(tmp_path, monkeypatch):
    program = tmp_path / "swift"
    program.write_text(SERVER_WITH_TWO_WORKERS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    named = (f"{VLLM}.mode=server", f"{VLLM}.server.base_url=http://127.0.0.1:{free_port()}")
    words = (*named, f"{SERVED}.vllm_data_parallel_size=2", f"{SERVED}.engine=swift")
    command = [*cli_command("serve", MATCHING, *words), "--gpus", "0,1"]
    with started(command, tmp_path / "output.txt") as launcher:
        launcher.wait_until(lambda: "serving" in launcher.output())
        assert len(in_session(launcher.process.pid)) >= 3
        launcher.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 10
        while in_session(launcher.process.pid) and time.monotonic() < deadline:
            launcher.process.poll()
            time.sleep(0.05)
        assert in_session(launcher.process.pid) == []
