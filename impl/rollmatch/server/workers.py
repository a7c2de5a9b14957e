"""Processes for work that may take too long, take too much memory or crash: they are ended and started again."""

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from pebble import ProcessExpired, ProcessPool

TOO_SLOW = (TimeoutError, FutureTimeout)
"""What a future raises where its work took too long."""
DIED = (ProcessExpired, BrokenExecutor, MemoryError)
"""What a future raises where its process died."""


class Workers:
    """``num`` processes, begun with the first work; they end with this process."""

    def __init__(
        self, num: int, *, begin: Callable[..., None] | None = None, arguments: tuple[object, ...] = ()
    ) -> None:
        """``begin`` is called in each process when it starts."""
        self._num, self._begin, self._arguments = num, begin, arguments
        self._pool: ProcessPool | None = None
        self._lock = threading.Lock()

    def schedule(self, work: Callable[..., Any], *arguments: object, timeout_s: float) -> "Future[Any]":
        """Begin work; its time counts from when a process takes it."""
        with self._lock:
            if self._pool is None or not self._pool.active:  # one that died without work ends pebble's pool
                # Not forked: this process has threads and may have a GPU.
                context = multiprocessing.get_context("forkserver")
                self._pool = ProcessPool(self._num, initializer=self._begin, initargs=self._arguments, context=context)
            future: Future[Any] = self._pool.schedule(work, args=list(arguments), timeout=timeout_s)
        return future
