"""A Ray actor that runs one command of a run as a child process, hands on what it prints and takes it along."""

import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import psutil
import ray

from rollmatch.launch.processes import PYTHON, adopt_orphans, end_with_parent, kill_family, kill_orphans
from rollmatch.startup import start_thread

_DRAIN_S = 2.0
"""Time for the last lines after a command has ended; who inherited its output may hold it open for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSite:
    """Where an actor is."""

    host: str
    """Address of its node, as Ray's other nodes know it."""
    node: str
    """Ray's id of the node."""
    gpus: tuple[str, ...]
    """Devices that Ray has reserved for it."""
    port: int
    """A free one, held for the ranks' rendezvous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandReport:
    """What happened since the last one."""

    lines: tuple[str, ...]
    code: int | None
    """Exit code, or minus the signal that ended it; None while it runs."""


class CommandActor:
    """``rollmatch WORD...`` on a node. All calls return at once and run in the main thread of the actor's process:
    the kernel binds the child's life to the thread that started it."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        adopt_orphans()

    def site(self) -> ActorSite:
        """This node and the GPUs of the reservation."""
        node = ray.get_runtime_context().get_node_id()
        host = next(one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node)
        self._held = hold_port()
        port = self._held.getsockname()[1]
        return ActorSite(host=host, node=node, gpus=tuple(map(str, ray.get_gpu_ids())), port=port)

    def start(self, words: Sequence[str], environment: Mapping[str, str], directory: str) -> int:
        """Start the command in ``directory``; returns its process id.

        ``OMP_NUM_THREADS`` is Ray's word for the CPUs of an actor, not the user's: it counts only in ``environment``.
        """
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._child = psutil.Popen(
            [*PYTHON, "-m", "rollmatch", *words],
            cwd=directory,
            env={**inherited, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_as_child,
        )
        self._reader = start_thread(partial(self._read, self._child), name="output")
        return int(self._child.pid)

    def _read(self, child: psutil.Popen) -> None:
        for line in child.stdout:
            self._lines.append(line.rstrip("\n"))

    def report(self) -> CommandReport:
        """Lines since the last report, and the exit code; an ended command leaves no process behind."""
        code = self._child.poll()
        if code is not None:
            kill_family(self._child)
            kill_orphans()
            self._reader.join(_DRAIN_S)
        lines = tuple(self._lines.popleft() for _ in range(len(self._lines)))
        return CommandReport(lines=lines, code=code)

    def signal(self, number: int) -> None:
        """Send a signal to the command, which knows how to end its own children."""
        if self._child.poll() is None:
            self._child.send_signal(number)

    def kill(self) -> None:
        """Kill the command and all that it started, at once."""
        if self._child.poll() is None:
            kill_family(self._child)


def hold_port() -> socket.socket:
    """A socket at a free port of all interfaces, which nobody is given while it is open.

    It does not listen, and lets others do so that set ``SO_REUSEADDR``, too, and ask for this port: torch's store does.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def _as_child() -> None:
    """In the child: Ray's processes block SIGINT, and a lost actor takes its command along, without farewell."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    end_with_parent(signal.SIGKILL)
