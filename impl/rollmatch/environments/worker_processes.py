"""Worker processes for users' code: several calls at a time, and calls that can be ended. Needs no torch."""

import multiprocessing
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from pebble import ProcessPool

Result = TypeVar("Result")
Arguments = tuple[Sequence[object], Mapping[str, object]]


class WorkerProcesses:
    """``num`` processes, started with the first call and again where one ends; they end with this process.

    Functions and arguments are pickled: a function is imported by its name in the worker. ``modules`` are imported when
    a worker starts, so that this takes no time of a call.
    """

    def __init__(self, num: int, *, timeout_s: float | None = None, modules: Sequence[str] = ()) -> None:
        self.num, self.timeout_s, self.modules = num, timeout_s, tuple(modules)
        self._pool: ProcessPool | None = None
        self._lock = threading.Lock()

    def map(self, function: Callable[..., object], calls: Sequence[Arguments]) -> list[object]:
        """[N] the value or the exception of each call, in order: ``TimeoutError`` of one that took too long, pebble's
        ``ProcessExpired`` of one whose process died. A call's time begins when its process takes it.
        """
        return [_outcome(future) for future in [self._schedule(function, *call) for call in calls]]

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """What a call returns; from any thread. Errors: those of ``map``, raised."""
        return cast(Result, self._schedule(function, arguments, {}).result())

    def _schedule(
        self, function: Callable[..., object], arguments: Sequence[object], named: Mapping[str, object]
    ) -> "Future[object]":
        with self._lock:
            if self._pool is None:
                from pebble import ProcessPool

                # Not forked: this process has threads and may have a GPU.
                context = multiprocessing.get_context("forkserver")
                self._pool = ProcessPool(
                    max_workers=self.num, context=context, initializer=_import, initargs=[self.modules]
                )
            return self._pool.schedule(function, args=list(arguments), kwargs=dict(named), timeout=self.timeout_s)


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        import_module(module)


def _outcome(future: "Future[object]") -> object:
    try:
        return future.result()
    except Exception as error:  # noqa: BLE001  # the user's code may raise anything; it costs this call only
        return error


@lru_cache
def workers_of(num: int, timeout_s: float | None, modules: tuple[str, ...]) -> WorkerProcesses:
    """The same ones for the same arguments, in one process."""
    return WorkerProcesses(num, timeout_s=timeout_s, modules=modules)
