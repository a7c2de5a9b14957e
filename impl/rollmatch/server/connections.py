"""Connections of a server: accepted in a thread that answers health itself, bounded in number and in time.

The event loop may be busy for a while (vLLM prepares requests on it); a learner that requests health meanwhile must not
take the server for dead.
"""

import asyncio
import json
import math
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from http import HTTPStatus
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollmatch.config.limits import LimitsConfig
from rollmatch.startup import start_thread

MAX_HEAD_BYTES = 65_536
"""Of a request; a longer head ends its connection."""
_HEALTH = re.compile(rb"GET /health/?[ ?]")
_BACKLOG, _LOOK_S, _SEND_S = 2048, 0.25, 1.0
_GRACE_S, _START_POLL_S = 3, 0.01


Health = Callable[[], tuple[int, Mapping[str, object]]]
"""HTTP status and body of ``/health/``; called in the acceptor's thread."""


async def listen(
    app: ASGIApp, listener: socket.socket, limits: LimitsConfig, *, health: Health, is_ending: Callable[[], bool]
) -> None:
    """Serve an application until ``is_ending``, ten times a second; ``listener`` is bound, and closed at the end."""
    config = uvicorn.Config(
        app,
        http=protocol_with(limits),
        log_level="warning",
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=math.ceil(limits.idle_timeout_s),
    )
    server = EndedServer(config, is_ending)
    acceptor = Acceptor(listener, UvicornLoop(server), limits, health=health)

    async def accept() -> None:
        while not server.started:
            await asyncio.sleep(_START_POLL_S)
        acceptor.start()

    starting = asyncio.create_task(accept())
    try:
        await server.serve(sockets=[])
    finally:
        starting.cancel()
        acceptor.close()


class EndedServer(uvicorn.Server):
    """uvicorn's, without its handlers of signals, which it installs too late and removes too early."""

    def __init__(self, config: uvicorn.Config, is_ending: Callable[[], bool]) -> None:
        super().__init__(config)
        self._is_ending = is_ending

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Leave signals to the caller."""
        return nullcontext()

    async def on_tick(self, counter: int) -> bool:
        """As uvicorn's: whether to end."""
        self.should_exit = self.should_exit or self._is_ending()
        return await super().on_tick(counter)


class UvicornLoop:
    """uvicorn's side of the connections that the acceptor hands over. Made on the event loop."""

    def __init__(self, server: uvicorn.Server) -> None:
        self._server, self._loop = server, asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, connection: socket.socket) -> None:
        """Serve a connection. Called from the acceptor's thread."""
        try:
            self._loop.call_soon_threadsafe(self._adopt, connection)
        except RuntimeError:  # the loop has just been closed
            connection.close()

    def is_open(self) -> bool:
        """False once the server is to end."""
        return not self._server.should_exit

    def num_connections(self) -> int:
        """Connections that are open now."""
        return len(self._server.server_state.connections)

    def _adopt(self, connection: socket.socket) -> None:
        task = self._loop.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        config = self._server.config
        make = partial(
            cast(Callable[..., asyncio.Protocol], config.http_protocol_class),
            config=config,
            server_state=self._server.server_state,
            app_state=self._server.lifespan.state,
        )
        await self._loop.connect_accepted_socket(make, connection)


class Acceptor:
    """A thread that owns the listening socket."""

    def __init__(self, listener: socket.socket, loop: UvicornLoop, limits: LimitsConfig, *, health: Health) -> None:
        self._listener = listener
        self._loop = loop
        self._limits = limits
        self._health = health
        self._deadlines: dict[socket.socket, float] = {}
        """Connections from which nothing has come yet, and when they are closed."""
        self._selector = selectors.DefaultSelector()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen."""
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = start_thread(self._run, name="acceptor")

    def close(self) -> None:
        """Accept nothing more; connections that were handed over stay."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._loop.is_open() and not self._is_closed.is_set():
            for key, _ in self._selector.select(_LOOK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)
            now = time.monotonic()
            for connection in [each for each, deadline in self._deadlines.items() if deadline < now]:
                self._forget(connection).close()
        for connection in list(self._deadlines):
            self._forget(connection).close()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # the caller is gone again
            return
        except OSError:  # out of descriptors: until some are free, callers wait in the backlog
            time.sleep(_LOOK_S)
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        self._deadlines[connection] = time.monotonic() + self._limits.head_timeout_s

    def _read(self, connection: socket.socket) -> None:
        """The first bytes say whose connection it is; they stay in the socket's buffer for the event loop."""
        try:
            first = connection.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
        except OSError:
            first = b""
        self._forget(connection)
        if not first:
            connection.close()
        elif _HEALTH.match(first) and b"\r\n\r\n" in first:
            self._reply(connection, *self._health())
        elif len(self._deadlines) + self._loop.num_connections() >= self._limits.max_connections:
            remedy = "Try again later, or raise custom.extra.rollout_server.limits.max_connections."
            problem = f"{self._limits.max_connections} connections are open"
            busy = {"code": "server-busy", "key": "", "problem": problem, "remedy": remedy}
            self._reply(connection, HTTPStatus.TOO_MANY_REQUESTS, busy)
        else:
            self._loop.take(connection)

    def _forget(self, connection: socket.socket) -> socket.socket:
        self._selector.unregister(connection)
        del self._deadlines[connection]
        return connection

    def _reply(self, connection: socket.socket, status: int, body: Mapping[str, object]) -> None:
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


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol; a head that is too long or comes too slowly ends its connection."""

    limits: LimitsConfig
    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Time the first head from here."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As uvicorn's, while the head is not too long."""
        if self._timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._timer is not None and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.close()

    def on_message_begin(self) -> None:
        """Time the next head from its first byte."""
        if self._timer is None:
            self._begin_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._end_head()
        super().on_headers_complete()

    def _begin_head(self) -> None:
        self._head_bytes = 0
        self._timer = self.loop.call_later(self.limits.head_timeout_s, self.transport.close)

    def _end_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def protocol_with(limits: LimitsConfig) -> type[BoundedHttpProtocol]:
    """The protocol class of a server with these limits."""
    return type("ServerHttpProtocol", (BoundedHttpProtocol,), {"limits": limits})
