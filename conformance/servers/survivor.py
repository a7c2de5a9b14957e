"""A process that outlives the judge, however that ends, and ends the servers that it has started with it.

Run as a module: it is told the process id of each server, a line each, and at the end of its input ends those that are
still there. A signal at a parent's death would not do: it comes at the end of the thread that started a server, and
does not reach a server's own children.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).parents[2]
GRACE_S = 3.0


class Survivor:
    """One for all servers of this process; started with the first of them."""

    def __init__(self) -> None:
        self._pipe: IO[str] | None = None
        self._lock = threading.Lock()

    def tell(self, process_id: int) -> None:
        """This one must not outlive us."""
        with self._lock:
            if self._pipe is None:
                nothing, command = subprocess.DEVNULL, [sys.executable, "-m", "conformance.servers.survivor"]
                started = subprocess.Popen(
                    command, cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, text=True,
                    stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True,
                )  # fmt: skip
                self._pipe = started.stdin
            assert self._pipe is not None
            self._pipe.write(f"{process_id}\n")
            self._pipe.flush()


def end_all(processes: Iterable[psutil.Process]) -> None:
    """With all that came of them: the signal to end, and soon the one that nobody can refuse."""
    members = {member for process in processes for member in family_of(process)}
    for process in members:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(members, timeout=GRACE_S)
    for process in {left for member in alive for left in family_of(member)}:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def family_of(process: psutil.Process) -> list[psutil.Process]:
    """Itself and its descendants, and whoever is in its session."""
    try:
        found = [process, *process.children(recursive=True)] if process.is_running() else []
    except psutil.NoSuchProcess:
        found = []
    for other in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getsid(other.pid) == process.pid:
                found.append(other)
    return found


def main() -> None:
    known = []
    for line in sys.stdin:
        with suppress(psutil.NoSuchProcess):
            known.append(psutil.Process(int(line)))
    end_all(known)


if __name__ == "__main__":
    main()
