"""A server that the judge started: a process of its own, its output in a file, ended with all its children."""

import os
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import requests

from conformance.servers.survivor import Survivor

START_TIMEOUT_S, END_TIMEOUT_S = 400.0, 20.0
TAIL = 3000
"""Characters of its output that a failure shows."""
_RUNNING: set["Launched"] = set()
_SURVIVOR = Survivor()
"""Ends them all where this process is ended itself."""


def running_cpu_s() -> float:
    """Processor time that all servers which run now have used so far."""
    return sum(launched.cpu_s() for launched in list(_RUNNING))


class NotStarted(RuntimeError):
    """The server answers its health in time."""


class Launched:
    """Started at once; ``wait_ready`` waits until it answers."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.words, self.log = list(words), log
        self._known: dict[int, psutil.Process] = {}
        self._used_s: dict[int, float] = {}
        self._lock = threading.Lock()
        with log.open("w") as output:
            self.process = subprocess.Popen(
                self.words, cwd=log.parent, env=os.environ | dict(environment), stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        _SURVIVOR.tell(self.process.pid)
        _RUNNING.add(self)

    def wait_ready(self, health: str) -> None:
        """Errors: ``NotStarted``."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                told = self.log.read_text(errors="replace")[-TAIL:]
                raise NotStarted(f"{shlex.join(self.words)}\nended with {self.process.poll()}:\n{told}")
            with suppress(requests.RequestException):
                if requests.get(health, timeout=5).status_code == 200:
                    self.members()
                    return
            time.sleep(0.5)

    def members(self) -> list[psutil.Process]:
        """Itself and all its descendants, those included that have lost their parent since."""
        with self._lock:
            with suppress(psutil.NoSuchProcess):
                own = psutil.Process(self.process.pid)
                self._known |= {process.pid: process for process in [own, *own.children(recursive=True)]}
            return [process for process in self._known.values() if process.is_running()]

    def workers(self) -> list[psutil.Process]:
        """Descendants that hold an engine; not Python's own trackers."""
        own = self.process.pid
        return [p for p in self.members() if p.pid != own and not _is_tracker(p)]

    def cpu_s(self) -> float:
        """Processor time of all its processes; of those that are gone, as it was last seen."""
        for process in self.members():
            with suppress(psutil.NoSuchProcess):
                self._used_s[process.pid] = sum(process.cpu_times()[:2])
        return sum(self._used_s.values())

    def end(self, *, grace_s: float = 3.0) -> None:
        """With all its children, whatever it takes."""
        _RUNNING.discard(self)
        members = self.members()
        self.cpu_s()
        with suppress(ProcessLookupError):
            self.process.terminate()
        _, alive = psutil.wait_procs(members, timeout=grace_s if members else 0)
        for process in [*alive, *self.members()]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=END_TIMEOUT_S)


def _is_tracker(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return "tracker" in " ".join(process.cmdline())
    return True
