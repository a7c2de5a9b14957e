"""Rollout servers and learners on cores of their own, by the commands that people type, each with one thread."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from conformance.doubles.digits import ROOT, absolute
from conformance.doubles.instance import free_port
from conformance.doubles.started import Started, cli_command, journal_of, started
from rollmatch.config import load_config
from rollmatch.config.servers import pair_servers, server_section

CONFIG = ROOT / "fixtures/digits/3v1.yaml"
MATCHING = "custom.extra.rollout_matching"
MODES = ("off", "ahead")
"""``overlap``, with its usual settings."""
STILL_S = 0.02
PARTS = (
    "training.packing=false",
    "training.per_device_train_batch_size=4",
    "training.gradient_accumulation_steps=4",
    "training.learner_threads=1",
    "training.report_to=none",
    "training.save_steps=1000",
    "custom.extra.rollout_server.vllm_data_parallel_size=1",
    f"{MATCHING}.vllm.kv_cache_memory_mib=128",
)
"""Sixteen rollouts a step in four micro-batches in both modes."""


def cores() -> tuple[int, int]:
    """Of the server and of the learner, or of two servers."""
    first, *others = sorted(os.sched_getaffinity(0))
    return first, others[0]


def pinned(core: int, command: list[str]) -> list[str]:
    return ["taskset", "--cpu-list", str(core), *command]


@dataclass(frozen=True, slots=True)
class PinnedServer:
    """A server that runs, and the settings that a learner shares with it."""

    overrides: tuple[str, ...]

    def learn(self, out: Path, *overrides: str, resume: bool = False) -> list[dict]:
        """The journal of a whole run in a directory of its own."""
        command = cli_command("train", CONFIG, *self.overrides, f"training.output_dir={out}", *overrides)
        command.append("--resume" if resume else "--overwrite")
        with started(pinned(cores()[1], command), out.with_suffix(".txt")) as learner:
            assert learner.process.wait() == 0, learner.output()[-3000:]
        return journal_of(out, None)


@contextmanager
def pinned_server(folder: Path, *overrides: str) -> Iterator[PinnedServer]:
    """One server, until it is not needed any more."""
    settings = (*PARTS, *_addresses(1), *overrides)
    with served(folder, settings, cores()[:1]):
        yield PinnedServer(settings)


@contextmanager
def two_servers(folder: Path, *overrides: str) -> Iterator[tuple[tuple[str, ...], list[Started]]]:
    """One on each core, until they are not needed any more: their settings, and the commands that run."""
    settings = (*PARTS, *_addresses(2), *overrides)
    with served(folder, settings, cores()) as servers:
        yield settings, servers


def _addresses(num_servers: int) -> tuple[str, str]:
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(num_servers)]
    ports = [free_port() for _ in urls]
    return f"{MATCHING}.vllm.server.base_url={urls}", f"{MATCHING}.vllm.server.group_port={ports}"


@contextmanager
def served(folder: Path, settings: Sequence[str], cores: Sequence[int]) -> Iterator[list[Started]]:
    """The servers of a configuration, each of which keeps to its core."""
    command = [*cli_command("serve", CONFIG, *settings), "--gpus", "0"]
    addresses = pair_servers(server_section(load_config(CONFIG, absolute(*settings))))
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                started(pinned(core, [*command, "--server", str(place)]), folder / f"server-{place}.txt")
            )
            for place, core in enumerate(cores)
        ]
        for server, address in zip(running, addresses, strict=True):
            server.wait_healthy(address.base_url)
        yield running


@contextmanager
def slowed(server: Started) -> Iterator[None]:
    """All its processes stand still half of the time."""
    over = threading.Event()

    def slow() -> None:
        while not over.is_set():
            os.killpg(server.process.pid, signal.SIGSTOP)
            time.sleep(STILL_S)
            os.killpg(server.process.pid, signal.SIGCONT)
            time.sleep(STILL_S)

    thread = threading.Thread(target=slow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
