"""Processes that try one fault after the other, each in a fork, and which of them gets what.

Every trial can run apart, in a pytest of its own. Most cost a tenth of that in a fork of a process that has collected
the tests (``warm``): once there is one it gets all trials, and what it refuses runs apart.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

from conformance.harness.faults.trial import Answer, Run, Trial, read_trial, run_apart, speak_into, start_trial
from conformance.harness.faults.warm import collect_and

FEW = 4
"""So many trials take less time apart than it takes to collect their tests."""
READY = ""
"""What a worker says first; then it says which trial has ended."""


class WorkerEnded(RuntimeError):
    """A worker lives until nobody asks it any more; what it told stands in the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A trial that has ended."""

    trial: Trial
    answer: Answer
    wall_s: float
    cpu_s: float
    """With that of all processes that it waited for."""


class Workers:
    """At most so many compute at any time; who collects tests does, too."""

    def __init__(self, trials: Sequence[Trial], folder: Path, *, num_workers: int) -> None:
        self.trials, self.folder, self.num_workers = {trial.name: trial for trial in trials}, folder, num_workers
        self.waiting, self.busy, self.refused = list(self.trials), set[str](), set[str]()
        self.apart: list[Connection] = []
        self.warm: list[Connection] = []
        self.forked: list[int] = []
        self.idle: set[Connection] = set()
        """A worker is when it has said so: first, and after each trial."""

    def try_all(self) -> Iterator[Tried]:
        """As they end; they begin in their order."""
        self.apart = self._fork(lambda ends: self._serve(ends, run_apart), "apart")
        if len(self.trials) > FEW:
            files = {test.partition("::")[0] for trial in self.trials.values() if trial.fault for test in trial.tests}
            self.warm = self._fork(lambda ends: collect_and(lambda run: self._serve(ends, run), files), "warm")
        is_ready = not self.warm
        while self.waiting or self.busy:
            while self.waiting and len(self.busy) < self.num_workers - (not is_ready) and self._start(is_ready):
                pass
            for worker in wait([*self.apart, *self.warm]):
                assert isinstance(worker, Connection)
                is_ready = is_ready or worker in self.warm
                if (tried := self._hear(worker)) is not None:
                    yield tried
        for worker in (*self.apart, *self.warm):
            worker.close()
        _wait_for(self.forked)

    def _start(self, is_ready: bool) -> bool:
        """The next trial, if who is to run it has nothing to do."""
        name = self.waiting[0]
        among = self.warm if self.warm and is_ready and name not in self.refused else self.apart
        worker = next((each for each in among if each in self.idle), None)
        if worker is None:
            return False
        self.idle.remove(worker)
        self.busy.add(name)
        worker.send(self.waiting.pop(0))
        return True

    def _hear(self, worker: Connection) -> Tried | None:
        """The trial that has ended, if one has."""
        try:
            name, wall_s, cpu_s = worker.recv()
        except EOFError:
            kind = "warm" if worker in self.warm else "apart"
            raise WorkerEnded((self.folder / f"{kind}.told").read_text(errors="replace")[-2000:]) from None
        self.idle.add(worker)
        if name == READY:
            return None
        self.busy.remove(name)
        answer = read_trial(self._out(name), self.trials[name])
        if answer is not None:
            return Tried(trial=self.trials[name], answer=answer, wall_s=wall_s, cpu_s=cpu_s)
        self.refused.add(name)
        self.waiting.insert(0, name)
        return None

    def _fork(self, serve: Callable[[list[Connection]], None], kind: str) -> list[Connection]:
        """Our ends of the pipes to as many workers, forked from a process that comes to ``_serve`` with theirs."""
        pipes = [Pipe() for _ in range(self.num_workers)]
        if not (child := os.fork()):
            for end in (*self.apart, *(ours for ours, _ in pipes)):
                end.close()  # who holds one hears the other end close
            _live(lambda: serve([theirs for _, theirs in pipes]), told=self.folder / f"{kind}.told")
        self.forked.append(child)
        for _, theirs in pipes:
            theirs.close()
        return [ours for ours, _ in pipes]

    def _serve(self, ends: list[Connection], run: Run) -> None:
        """In a process from which trials can fork: be the first worker, and fork the others."""
        forked = []
        for end in ends[1:]:
            if not (child := os.fork()):
                for other in {*ends} - {end}:
                    other.close()
                _live(partial(self._work, end, run))
            forked.append(child)
            end.close()
        self._work(ends[0], run)
        _wait_for(forked)

    def _work(self, end: Connection, run: Run) -> None:
        """One trial after the other, until nobody asks any more."""
        end.send((READY, 0.0, 0.0))
        with suppress(EOFError):
            while name := end.recv():
                self._out(name).unlink(missing_ok=True)
                began = time.perf_counter()
                child = start_trial(self.trials[name], self._out(name), run)
                _, _, used = os.wait4(child, 0)
                end.send((name, time.perf_counter() - began, used.ru_utime + used.ru_stime))

    def _out(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def _wait_for(processes: Sequence[int]) -> None:
    for each in processes:
        os.waitpid(each, 0)


def _live(work: Callable[[], None], *, told: Path | None = None) -> NoReturn:
    """In a fork: nothing else than that, and whatever happens nothing afterwards."""
    code = 1
    try:
        if told is not None:
            speak_into(told)
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may go on into the code of who has forked
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
