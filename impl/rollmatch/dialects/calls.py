"""Anything that runs in a thread while the caller does something else."""

import queue
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, TypeVar, cast

from rollmatch.errors import RollmatchError
from rollmatch.startup import start_thread

Result = TypeVar("Result")


class BackgroundCall(Generic[Result]):
    """A call in a daemon thread: starts at once, and cannot keep the process from ending."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._arrivals: queue.SimpleQueue[tuple[Result | None, Exception | None]] = queue.SimpleQueue()
        self._outcome: tuple[Result | None, Exception | None] | None = None
        start_thread(partial(self._run, call), name="call")

    def is_done(self, *, within_s: float = 0.0) -> bool:
        """Whether it has ended, after waiting for so long at most."""
        if self._outcome is None:
            try:
                self._outcome = self._arrivals.get(block=within_s > 0, timeout=within_s or None)
            except queue.Empty:
                return False
        return True

    def result(self) -> Result:
        """What it returned, or its error; waits without limit."""
        if self._outcome is None:
            self._outcome = self._arrivals.get()
        result, error = self._outcome
        if error is not None:
            raise error
        return cast(Result, result)

    def _run(self, call: Callable[[], Result]) -> None:
        outcome: tuple[Result | None, Exception | None] = (
            None,
            RuntimeError("a call failed; see its thread's traceback"),
        )
        try:
            outcome = (call(), None)
        except RollmatchError as error:
            outcome = (None, error)
        finally:  # whatever it was: the caller must not wait for ever
            self._arrivals.put(outcome)


def run_all(calls: Iterable[Callable[[], Result]]) -> list[Result]:
    """Results of calls that run at the same time. Errors: that of the first call, in their order, that has one."""
    return [running.result() for running in [BackgroundCall(call) for call in calls]]
