"""Commands as people start them: a process of its own, its output in a file, and none left behind."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

from conformance.doubles.digits import CONFIG, ROOT, absolute
from conformance.doubles.instance import free_port
from conformance.doubles.processes import Running, start
from rollmatch.journal import read_journal

TIMEOUT_S = 240
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
RANKED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HF = (
    "custom.extra.rollout_matching.rollout_backend=hf",
    "custom.extra.rollout_matching.rollout_generate_batch_size=8",
    "custom.extra.rollout_matching.vllm.max_model_len=null",
    "custom.extra.rollout_matching.max_new_tokens=48",
    "training.learner_threads=1",
    "training.report_to=none",
)


def cli_command(name: str, config: Path, *overrides: str) -> list[str]:
    """``rollmatch NAME CONFIG`` with settings laid over it."""
    sets = [part for override in absolute(*overrides) for part in ("--set", override)]
    return [sys.executable, "-m", "rollmatch", name, str(config), *sets]


def train_command(*overrides: str, flags: tuple[str, ...] = ()) -> list[str]:
    """``rollmatch train`` on the digits."""
    return [*cli_command("train", CONFIG, *overrides), *flags]


class Started(Running):
    """A running command."""

    def __init__(self, command: list[str], log: Path, **variables: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in RANKED}
        super().__init__(start(command, log, environment=environment | ENVIRONMENT | variables), log)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output()[-3000:]}") from None


@contextmanager
def started(command: list[str], log: Path, **variables: str) -> Iterator[Started]:
    running = Started(command, log, **variables)
    try:
        yield running
    finally:
        running.end(grace_s=0)


def finish(command: list[str], log: Path, *, timeout_s: float = TIMEOUT_S, **variables: str) -> tuple[int, str]:
    """Exit code and output, once it ended."""
    with started(command, log, **variables) as running:
        return running.wait(timeout_s), running.output()


def rank_variables(num_ranks: int) -> list[dict[str, str]]:
    """Variables that torchrun sets for each rank of one machine."""
    world = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


@contextmanager
def started_ranks(folder: Path, num_ranks: int, *command: str, **variables: str) -> Iterator[list[Started]]:
    """The ranks of a command as torchrun would start them, except that none ends the others; logs in ``folder``."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(started(list(command), folder / f"rank{rank}.txt", **(variables | of_rank)))
            for rank, of_rank in enumerate(rank_variables(num_ranks))
        ]


def finish_ranks(folder: Path, num_ranks: int, *command: str, **variables: str) -> None:
    """All end with 0."""
    with started_ranks(folder, num_ranks, *command, **variables) as ranks:
        codes = [rank.wait() for rank in ranks]
        assert codes == [0] * num_ranks, "\n".join(rank.output()[-3000:] for rank in ranks)


def journal_of(directory: Path, event: str | None, *, name: str = "journal.jsonl") -> list[dict]:
    """Its events, of one kind if it is named; none before there is a journal."""
    path = directory / name
    return [line for line in read_journal(path) if event in (None, line["event"])] if path.exists() else []


def journals_of(directory: Path, event: str | None = None, *, num_ranks: int) -> list[list[dict]]:
    """Of each rank, in their order."""
    names = ["journal.jsonl", *(f"journal-rank{rank}.jsonl" for rank in range(1, num_ranks))]
    return [journal_of(directory, event, name=name) for name in names]


def in_time(journals: Iterable[list[dict]]) -> list[dict]:
    """Events of all ranks, one after the other."""
    return sorted(chain.from_iterable(journals), key=lambda event: event["time"])


def keep(trace: Iterable[dict], path: Path) -> None:
    """A journal that can be committed: paths in it begin at the root of the repository."""
    path.write_text("".join(json.dumps(event) + "\n" for event in trace).replace(f"{ROOT}/", ""))
