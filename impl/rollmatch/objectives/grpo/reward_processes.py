"""Worker processes of a reward function: several completions at a time, and calls that can be ended. Needs no torch."""

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as CallTimeout
from typing import TYPE_CHECKING

from rollmatch.errors import TargetError

if TYPE_CHECKING:
    from pebble import ProcessPool

Arguments = tuple[Sequence[object], Mapping[str, object]]


class RewardProcesses:
    """``num`` processes, started with the first call and again where one ends; they end with this process.

    Functions and arguments are pickled: a function is imported by its name in the worker.
    """

    def __init__(self, num: int, *, timeout_s: float | None = None) -> None:
        self.num, self.timeout_s = num, timeout_s
        self._pool: ProcessPool | None = None

    def map(self, function: Callable[..., object], calls: Sequence[Arguments]) -> list[object]:
        """[N] the value or the exception of each call, in order; a call's time begins when its process takes it."""
        if self._pool is None:
            from pebble import ProcessPool

            # Not forked: this process has threads and may have a GPU.
            self._pool = ProcessPool(max_workers=self.num, context=multiprocessing.get_context("forkserver"))
        futures = [
            self._pool.schedule(function, args=list(arguments), kwargs=dict(named), timeout=self.timeout_s)
            for arguments, named in calls
        ]
        return [self._outcome(future) for future in futures]

    def _outcome(self, future: "Future[object]") -> object:
        try:
            return future.result()
        except CallTimeout:
            return TargetError(
                f"no value within {self.timeout_s:g} s",
                code="reward-timeout",
                remedy="Raise timeout_s, or make it faster.",
            )
        except Exception as error:  # noqa: BLE001  # the user's code may raise anything; it costs this call only
            return error
