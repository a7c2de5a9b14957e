"""The process that owns a server's listening socket: it answers health itself and hands every other connection over.

Run as a file, with the standard library only: it starts in a few hundredths of a second and takes 10 MB. Nothing that
the server's process does, not even a C call that keeps Python's interpreter lock, delays an answer about health.

Over the control socket (a stream): to the server one byte, ``c`` with a connection's descriptor or ``h``, a question
for its health; from the server 4 bytes of length, then JSON ``[status, body, body of a stalled server]``.
"""

import contextlib
import json
import os
import re
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from http import HTTPStatus

MAX_HEAD_BYTES = 65_536
"""Of a call's head, and of what frames its body; more ends the connection."""
CONNECTION, HEALTH = b"c", b"h"
LENGTH = struct.Struct("!I")
_HEALTH = re.compile(rb"GET /health/?[ ?]")
_BACKLOG, _LOOK_S, _SEND_S = 2048, 0.25, 1.0
_ASK_S, _ANSWER_S = 1.0, 0.25
"""The server is asked this often, and a caller waits this long for a fresh answer before it gets the last one."""
_SPARE_DESCRIPTORS = 64
_FEW = 128
"""Connections that may be silent however few calls a server takes: every call is silent for a moment."""


class Front:
    """One listening socket."""

    def __init__(self, listener: socket.socket, control: socket.socket, settings: dict[str, float]) -> None:
        self._listener, self._control = listener, control
        self._head_s, self._stalled_s = settings["head_timeout_s"], settings["stalled_s"]
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_silent = min(max(_FEW, int(settings["max_connections"])), hard - _SPARE_DESCRIPTORS)
        self._silent: dict[socket.socket, float] = {}
        """Connections from which nothing has come yet, oldest first, and when they are closed."""
        self._asking: dict[socket.socket, float] = {}
        """Callers of health, and when they get the last known answer."""
        self._received = b""
        self._known: tuple[int, dict[str, object], dict[str, object]] | None = None
        self._known_at, self._asked_at = time.monotonic(), 0.0
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Until the server's process closes the control socket."""
        parent = os.getppid()
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._control, selectors.EVENT_READ)
        is_open = True
        while is_open and os.getppid() == parent:
            wait_s = _LOOK_S if not self._asking else 0.02
            for key, _ in self._selector.select(wait_s):
                if key.fileobj is self._control:
                    is_open = self._learn()
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._silent:
                    self._sort(key.fileobj)
            self._keep_time()

    def _keep_time(self) -> None:
        now = time.monotonic()
        for connection in [each for each, deadline in self._silent.items() if deadline < now]:
            self._forget(connection).close()
        if now - self._asked_at > _ASK_S:
            self._ask()
        if self._known is not None:
            for connection in [each for each, deadline in self._asking.items() if deadline < now]:
                del self._asking[connection]
                reply(connection, *self._health())

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # the caller is gone again
            return
        except OSError:  # out of descriptors: whoever says nothing makes room
            if self._silent:
                self._forget(next(iter(self._silent))).close()
            else:
                time.sleep(_LOOK_S)
            return
        if len(self._silent) >= self._most_silent:
            self._forget(next(iter(self._silent))).close()
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        self._silent[connection] = time.monotonic() + self._head_s

    def _sort(self, connection: socket.socket) -> None:
        """The first bytes say whose connection it is; they stay in the socket's buffer for the server."""
        try:
            first = connection.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
        except OSError:
            first = b""
        self._forget(connection)
        if not first:
            connection.close()
        elif _HEALTH.match(first) and b"\r\n\r\n" in first:
            self._asking[connection] = time.monotonic() + _ANSWER_S
            self._ask()
        else:
            try:
                socket.send_fds(self._control, [CONNECTION], [connection.fileno()], socket.MSG_DONTWAIT)
            except OSError:  # the server takes none at the moment
                problem = {"code": "server-busy", "key": "", "problem": "the server takes no connection at the moment"}
                reply(connection, HTTPStatus.TOO_MANY_REQUESTS, problem | {"remedy": "Try again later."})
            connection.close()

    def _forget(self, connection: socket.socket) -> socket.socket:
        self._selector.unregister(connection)
        del self._silent[connection]
        return connection

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        with contextlib.suppress(BlockingIOError):  # it has enough questions
            self._control.send(HEALTH, socket.MSG_DONTWAIT)

    def _learn(self) -> bool:
        """Read what the server says of itself; False at its end."""
        try:
            data = self._control.recv(MAX_HEAD_BYTES)
        except OSError:
            return False
        self._received += data
        while len(self._received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received)
            if len(self._received) < LENGTH.size + length:
                break
            self._known = tuple(json.loads(self._received[LENGTH.size : LENGTH.size + length]))
            self._known_at = time.monotonic()
            self._received = self._received[LENGTH.size + length :]
            for connection in list(self._asking):
                del self._asking[connection]
                reply(connection, *self._health())
        return bool(data)

    def _health(self) -> tuple[int, dict[str, object]]:
        """The last answer, as old as it is: 503 where the server has not answered for too long."""
        assert self._known is not None
        status, about, stalled = self._known
        silence_s = time.monotonic() - self._known_at
        if silence_s < _ASK_S:
            return status, about
        lag_s = round(float(str(about["lag_s"])) + silence_s, 3)
        if status == HTTPStatus.OK and lag_s > self._stalled_s:
            return HTTPStatus.SERVICE_UNAVAILABLE, about | stalled | {"lag_s": lag_s}
        return status, about | {"lag_s": lag_s}


def reply(connection: socket.socket, status: int, body: Mapping[str, object]) -> None:
    raw = json.dumps(body).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\nconnection: close\r\n\r\n"
    )
    try:
        connection.recv(MAX_HEAD_BYTES)  # a socket that is closed with unread bytes resets the connection
        connection.settimeout(_SEND_S)
        connection.sendall(head.encode() + raw)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the caller is gone
    finally:
        connection.close()


def main(listener: int, control: int, settings: str) -> None:
    """Serve; the arguments are two descriptors and JSON."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the server ends, and closes the control socket
        signal.signal(number, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    Front(socket.socket(fileno=listener), socket.socket(fileno=control), json.loads(settings)).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
