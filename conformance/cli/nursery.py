"""Commands without the seconds in which Python loads: each forks from one process that has loaded everything.

    python -m conformance.cli.nursery SOCKET MODULE... [--collect-only TEST...]

A connection asks for one command and hears its process id, then how it ended; the last connection that closes ends the
nursery. What a command is given is what a shell would give it: arguments, environment, folder, a session of its own,
and a log or the three standard streams of who asks. Tests are loaded as pytest loads them, for its own workers.
"""

import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from conformance.cli.forked import divided
from rollmatch.cli.learner import set_environment
from rollmatch.startup import leave, loading

MESSAGE_BYTES = 1 << 18


class Nursery:
    """Its connections, and whose command runs."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"{address}.new")
        self.listener.listen(64)
        os.rename(f"{address}.new", address)  # who finds it can connect
        self.connections: set[socket.socket] = set()
        self.asked: dict[int, socket.socket] = {}
        """Process id -> who is told how it ended."""

    def serve(self) -> None:
        """Until nobody is connected any more."""
        signal.signal(signal.SIGCHLD, self._reap)
        while True:
            ready, _, _ = select.select([self.listener, *self.connections], [], [])
            for each in ready:
                if each is self.listener:
                    self.connections.add(each.accept()[0])
                    continue
                message, streams = _received(each)
                if message:
                    self._start(each, json.loads(message), streams)
                else:
                    self.connections.discard(each)
                    each.close()
            if not self.connections and not self._is_asked_for():
                return

    def _is_asked_for(self) -> bool:
        """By somebody who has connected just now; afterwards nobody can."""
        for name in (self.address, f"{self.address}.lock"):
            Path(name).unlink(missing_ok=True)
        return bool(select.select([self.listener], [], [], 0)[0])

    def _start(self, connection: socket.socket, order: dict[str, Any], streams: list[int]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # its end is not told before its beginning
        process_id = os.fork()
        if not process_id:
            self._live(connection, order, streams)
        for each in streams:
            os.close(each)
        self.asked[process_id] = connection
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def _live(self, connection: socket.socket, order: dict[str, Any], streams: list[int]) -> NoReturn:
        """In the child: be the command."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.setsid()
        _set_streams(streams or _log_of(order))
        _send(connection, {"process_id": os.getpid()})  # who is told finds the log
        for each in (self.listener, *self.connections):
            each.close()
        _put_in_place(order)
        leave(run(order["words"]))

    def _reap(self, *_: object) -> None:
        with suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG):
                process_id, status = ended
                if not process_id:
                    return
                if connection := self.asked.pop(process_id, None):
                    _send(connection, {"code": os.waitstatus_to_exitcode(status)})


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    """An order, and the streams of who asks, or neither."""
    with suppress(ConnectionResetError):
        message, streams, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        return message, streams
    return b"", []


def _send(connection: socket.socket, told: dict[str, int]) -> None:
    with suppress(OSError):  # nobody listens any more
        connection.send(json.dumps(told).encode())


def _put_in_place(order: dict[str, Any]) -> None:
    """Name, environment, folder."""
    with suppress(ImportError):
        # Comes with vLLM, which names its workers; only as long as the environment is the first can it.
        from setproctitle import setproctitle

        setproctitle(" ".join([sys.executable, *order["words"]]))
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.path[1:1] = [
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path
    ]
    if order["log"]:
        os.execve = _become  # type: ignore[assignment]


def _log_of(order: dict[str, Any]) -> list[int]:
    """What a shell would make of ``</dev/null >LOG 2>&1``."""
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    return [os.open(os.devnull, os.O_RDONLY), log, os.dup(log)]


def _set_streams(streams: list[int]) -> None:
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
        os.close(stream)


def _become(program: str, words: list[str], environment: dict[str, str]) -> NoReturn:
    """A command that replaces itself by Python has what it needs here."""
    assert program == sys.executable, program
    os.environ.clear()
    os.environ.update(environment)
    leave(run(list(words[1:])))


def run(words: list[str]) -> int:
    """As ``python WORD...``: code, a module or a script. Returns its exit code."""
    try:
        if words[0] == "-c":
            sys.argv[:] = ["-c", *words[2:]]
            sys.modules["__main__"] = main_module = ModuleType("__main__")
            exec(words[1], vars(main_module))
        elif words[0] == "-m":
            sys.argv[:] = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - nothing may go on into the nursery's code
        traceback.print_exc()
        return 1
    return 0


def main(address: str, *loaded: str) -> None:
    """Listens as soon as everything is loaded; holds no end of a pipe that somebody waits for."""
    _set_streams([os.open(os.devnull, os.O_RDWR) for _ in (0, 1)])
    modules, tests = divided(loaded)
    set_environment()
    with loading():
        for name in modules:
            import_module(name)
        if "transformers.models.auto.processing_auto" in modules:
            from transformers import AutoProcessor

            AutoProcessor.from_pretrained("fixtures/models/digits")  # loads some models
        if tests:
            import pytest

            pytest.main([*tests, "--capture=no", "-p", "no:cacheprovider"])
    Nursery(address).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
