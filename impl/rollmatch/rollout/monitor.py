"""Where the learner and the threads that call servers wait for each other: one lock, one condition."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from rollmatch.startup import start_thread


class Monitor(Protocol):
    """A lock that one can wait in until something holds; one thread at a time is inside."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    def wait(self, condition: Callable[[], bool], *, timeout_s: float | None = None) -> bool:
        """Inside: step out until ``condition`` holds; False if the time was up first."""

    def notify(self) -> None:
        """Inside: those who wait look again."""

    def start(self, work: Callable[[], None], *, name: str) -> None:
        """Run ``work`` beside everything else."""


class ThreadMonitor:
    """The monitor of real runs; its threads do not keep the process from ending."""

    def __init__(self) -> None:
        self._condition = threading.Condition()

    def __enter__(self) -> object:
        return self._condition.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._condition.__exit__(kind, error, trace)

    def wait(self, condition: Callable[[], bool], *, timeout_s: float | None = None) -> bool:
        """As ``Monitor``."""
        return self._condition.wait_for(condition, timeout=timeout_s)

    def notify(self) -> None:
        """As ``Monitor``."""
        self._condition.notify_all()

    def start(self, work: Callable[[], None], *, name: str) -> None:
        """As ``Monitor``."""
        start_thread(work, name=name)
