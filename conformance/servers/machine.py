"""What servers that are judged at the same time share: cores, room in memory, and quiet for timed checks."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

NUM_CORES, NUM_SERVERS = 2, 6
SERVER_BYTES = 3 << 30
"""What the largest takes: three processes with torch, one of them with a cache of 1 GiB."""
QUIET_SHARE, QUIET_LIMIT_S = 0.25, 45.0
"""Of one core, that all servers together may use while a check is timed, and how long that is waited for."""


class Machine:
    """Work waits its turn, first come first served; who waits for quiet is overtaken by nobody.

    A start, and a row of gentle checks, take one core. A dangerous check takes none, because it mostly waits for a
    server that answers no more: ``cpu_s`` tells what all servers have used so far, and quiet is when that stands still.
    """

    def __init__(
        self, *, num_cores: int = NUM_CORES, num_servers: int = NUM_SERVERS, cpu_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.room = threading.Semaphore(num_servers)
        """For one running server; taken before cores are, and never while holding any."""
        self._num_cores, self._num_free, self._cpu_s = num_cores, num_cores, cpu_s
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._own = threading.local()

    @contextmanager
    def core(self) -> Iterator[None]:
        """One core; nothing more to who holds one already."""
        with self._held(1):
            yield

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """All cores, and nothing else under way but waiting."""
        with self._held(self._num_cores):
            self._settle()
            yield

    def turn(self) -> None:
        """Returns when nobody has quiet or waits for it."""
        with self.core():
            return

    @contextmanager
    def _held(self, count: int) -> Iterator[None]:
        if getattr(self._own, "holds", False):
            yield
            return
        self._take(count)
        self._own.holds = True
        try:
            yield
        finally:
            self._own.holds = False
            with self._changed:
                self._num_free += count
                self._changed.notify_all()

    def _take(self, count: int) -> None:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._waiting[0] is ticket and self._num_free >= count)
            self._waiting.popleft()
            self._num_free -= count
            self._changed.notify_all()

    def _settle(self, pause_s: float = 0.5) -> None:
        deadline = time.monotonic() + QUIET_LIMIT_S
        before = self._cpu_s()
        while time.monotonic() < deadline:
            time.sleep(pause_s)
            before, used_s = (now := self._cpu_s()), now - before
            if used_s < QUIET_SHARE * pause_s:
                return


def servers_that_fit() -> int:
    """At least one."""
    return max(1, min(NUM_SERVERS, psutil.virtual_memory().available // SERVER_BYTES))
