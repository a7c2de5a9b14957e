"""How a server process ends: in order while it serves; at once while engines start, or when that takes too long.

A thread acts on signals. It reads them from a pipe into which Python's C handler writes, because the main thread may be
in a call of a library, or hold a lock.
"""

import contextlib
import os
import select
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Self

import psutil

from rollmatch.startup import start_thread

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LONGEST_S = 15.0
"""From a signal to the end of a server that does not end in order."""
_MOST_ROUNDS = 10


class Shutdown:
    """End of this process by ``SIGNALS``, from entering it on. ``cleanup`` is called before an end at once.

    A signal before ``begin_serving`` ends the process at once. A later one sets ``exit_code``: the server, which polls
    ``is_requested``, has ``LONGEST_S`` to end in order; another signal ends it at once.
    """

    def __init__(self, cleanup: Callable[[], object]) -> None:
        self.exit_code: int | None = None
        """128 + signal, or what was requested."""
        self._cleanup, self._is_serving = cleanup, False

    def __enter__(self) -> Self:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        is_kept = {number: number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN for number in SIGNALS}
        self._before = {number: signal.signal(number, _ignore) for number in SIGNALS if not is_kept[number]}  # nohup
        signal.set_wakeup_fd(self._writing)
        start_thread(self._watch, name="shutdown")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.exit_code is not None:  # watched until the process has ended: exit functions may wait, too
            return
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._writing)

    def begin_serving(self) -> None:
        """Signals are noticed by ``is_requested`` from now on."""
        self._is_serving = True

    def is_requested(self) -> bool:
        """Whether the server is to end."""
        return self.exit_code is not None

    def request(self, exit_code: int) -> None:
        """End in order, as by a signal; without effect after one."""
        if self.exit_code is None:
            self.exit_code = exit_code
            os.write(self._writing, b"\0")

    def forget_in_child(self) -> None:
        """Give a forked child its signals back; end one that was forked while this process is being ended."""
        signal.set_wakeup_fd(-1)
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
        if self.exit_code is not None:
            os._exit(self.exit_code)

    def _watch(self) -> None:
        """In a thread: wait for signals."""
        first = os.read(self._reading, 1)
        if not first:
            os.close(self._reading)
            return
        if self.exit_code is None:
            self.exit_code = 128 + first[0]
        if self._is_serving:
            select.select([self._reading], [], [], LONGEST_S)
        try:
            kill_children()
            self._cleanup()
        finally:
            os._exit(self.exit_code)


def kill_children() -> None:
    """Kill all descendants but Python's resource tracker, which ends by itself after it has freed what they held."""
    for _ in range(_MOST_ROUNDS):  # one may be started meanwhile
        family = [process for process in psutil.Process().children(recursive=True) if not _ends_itself(process)]
        if not family:
            return
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=1.0)


def _ends_itself(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE or "resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True


def _ignore(number: int, frame: object) -> None:
    """Do nothing: the pipe has the signal."""
