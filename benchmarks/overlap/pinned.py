"""A rollout server on one core and learners on another, by the commands that people type, each with one thread."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from conformance.launch.started import cli_command, is_healthy, journal_of, started
from conformance.rollout.digits import ROOT
from conformance.wire.instance import free_port

CONFIG = ROOT / "fixtures/digits/3v1.yaml"
MATCHING = "custom.extra.rollout_matching"
MODES = ("off", "ahead", "stream")
"""``overlap``, with its usual settings."""
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
"""Sixteen rollouts a step in four micro-batches in every mode: streaming needs parts, and does not pack."""


def cores() -> tuple[int, int]:
    """Of the server and of the learner."""
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
            assert learner.process.wait() == 0, learner.told()[-3000:]
        return journal_of(out, None)


@contextmanager
def pinned_server(folder: Path, *overrides: str) -> Iterator[PinnedServer]:
    """One replica, until it is not needed any more."""
    http = free_port()
    url = f"http://127.0.0.1:{http}"
    where = (f"{MATCHING}.vllm.server.base_url={url}", f"{MATCHING}.vllm.server.group_port={free_port()}")
    settings = (*PARTS, *where, *overrides)
    command = [*cli_command("serve", CONFIG, *settings), "--gpus", "0"]
    with started(pinned(cores()[0], command), folder / "server.txt") as server:
        server.wait_until(lambda: is_healthy(url))
        yield PinnedServer(settings)
