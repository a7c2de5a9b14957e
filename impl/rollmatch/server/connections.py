"""Connections of a server: accepted by a process of their own, which answers health, and bounded in number.

The event loop may be busy for a while, and so may Python's interpreter lock; a learner that requests health meanwhile
must not take the server for dead.
"""

import asyncio
import contextlib
import json
import math
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from http import HTTPStatus
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from rollmatch.config.limits import LimitsConfig
from rollmatch.server import front
from rollmatch.server.health import STALLED_S, stalled_failure
from rollmatch.server.http_protocol import BoundedHttpProtocol, protocol_with
from rollmatch.startup import start_thread

_LOOK_S = 0.25
_GRACE_S, _START_POLL_S = 3, 0.01
_NEW_S = 1.0
"""A connection is not given up for another one before it is this old."""


Health = Callable[[], tuple[int, Mapping[str, object]]]
"""HTTP status and body of ``/health/``; called in the acceptor's thread."""


async def listen(
    app: ASGIApp, listener: socket.socket, limits: LimitsConfig, *, health: Health, is_ending: Callable[[], bool]
) -> None:
    """Serve an application until ``is_ending``, ten times a second; ``listener`` is bound, and closed at the end."""
    config = uvicorn.Config(
        app,
        http=protocol_with(limits),
        ws="none",
        log_level="warning",
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=math.ceil(limits.idle_timeout_s),
    )
    server = EndedServer(config, is_ending)
    acceptor = Acceptor(listener, UvicornLoop(server, limits), limits, health=health)

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

    def __init__(self, server: uvicorn.Server, limits: LimitsConfig) -> None:
        self._server, self._limits, self._loop = server, limits, asyncio.get_running_loop()
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

    def num_serving(self) -> int:
        """Calls that are whole and not yet answered."""
        return sum(each.is_serving for each in self._connections())

    def _connections(self) -> list[BoundedHttpProtocol]:
        return cast(list[BoundedHttpProtocol], list(self._server.server_state.connections))

    def _adopt(self, connection: socket.socket) -> None:
        self._make_room()
        task = self._loop.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _make_room(self) -> None:
        """Give up the connection that has sent the least of its next call, where too many are open."""
        known, old = self._connections(), time.monotonic() - _NEW_S
        waiting = [each for each in known if not each.is_serving and each.began < old]
        if waiting and len(known) >= self._limits.max_connections:
            min(waiting, key=BoundedHttpProtocol.received).give_up()

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
    """A thread that takes connections from the process ``front``, which owns the listening socket, and sends it health.

    A front that dies is started again.
    """

    def __init__(self, listener: socket.socket, loop: UvicornLoop, limits: LimitsConfig, *, health: Health) -> None:
        self._listener = listener
        self._loop = loop
        self._limits = limits
        self._health = health
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen."""
        self._thread = start_thread(self._run, name="acceptor")

    def close(self) -> None:
        """Accept nothing more; connections that were handed over stay."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._is_open():
            ours, its = socket.socketpair()
            os.register_at_fork(after_in_child=ours.close)  # an engine that outlives this process is not the front's
            with ours:
                process = self._start_front(its)
                its.close()
                try:
                    self._serve(ours)
                finally:
                    process.kill()
                    process.wait()
        self._listener.close()

    def _is_open(self) -> bool:
        return self._loop.is_open() and not self._is_closed.is_set()

    def _start_front(self, control: socket.socket) -> "subprocess.Popen[bytes]":
        descriptors = (self._listener.fileno(), control.fileno())
        settings = {
            "head_timeout_s": self._limits.head_timeout_s,
            "max_connections": self._limits.max_connections,
            "stalled_s": STALLED_S,
        }
        command = [sys.executable, "-I", "-S", front.__file__, *map(str, descriptors), json.dumps(settings)]
        return subprocess.Popen(command, pass_fds=descriptors, start_new_session=True)

    def _serve(self, control: socket.socket) -> None:
        """Until the front or the server ends."""
        self._tell(control)
        with selectors.DefaultSelector() as selector:
            selector.register(control, selectors.EVENT_READ)
            while self._is_open():
                if not selector.select(_LOOK_S):
                    continue
                try:
                    kind, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                except OSError:
                    return
                if not kind:
                    return
                for descriptor in descriptors:
                    self._take(socket.socket(fileno=descriptor))
                if kind == front.HEALTH:
                    self._tell(control)

    def _tell(self, control: socket.socket) -> None:
        raw = json.dumps((*self._health(), stalled_failure())).encode()
        with contextlib.suppress(OSError):  # the front is gone: noticed with the next look
            control.sendall(front.LENGTH.pack(len(raw)) + raw)

    def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if self._loop.num_serving() < self._limits.max_connections:
            self._loop.take(connection)
            return
        remedy = "Try again later, or raise custom.extra.rollout_server.limits.max_connections."
        problem = f"{self._limits.max_connections} calls are being served"
        busy = {"code": "server-busy", "key": "", "problem": problem, "remedy": remedy}
        front.reply(connection, HTTPStatus.TOO_MANY_REQUESTS, busy)
