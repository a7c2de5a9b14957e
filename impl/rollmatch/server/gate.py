"""ASGI middleware around every route: who may call, how large and how slow a body may be, and what is counted."""

import asyncio
import time
from dataclasses import dataclass

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollmatch.config.limits import LimitsConfig
from rollmatch.server.access import check_content_type, check_key, check_names
from rollmatch.server.failures import Refusal
from rollmatch.server.http import refuse
from rollmatch.server.state import ServerState

_OPEN = ("/health/",)
"""Routes that are answered without the key."""
_LIMITS = "custom.extra.rollout_server.limits"


class SlashAtEnd:
    """Routes are reached with and without their last slash, without a redirect that would cost the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].endswith((".json", "/")):
            scope = {**scope, "path": scope["path"] + "/"}
        await self.app(scope, receive, send)


class Gate:
    """Refuse calls that may not be served, bound the bodies of the others, and count all."""

    def __init__(self, app: ASGIApp, *, server: ServerState) -> None:
        self.app, self.settings, self.metrics = app, server.settings, server.metrics
        self.buffered = BufferedBytes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, statuses = time.perf_counter(), [500]

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        request, body = Request(scope), BoundedBody(receive, self.settings.limits, self.buffered)
        try:
            self._check(request, body)
        except Refusal as refusal:
            await refuse(request, refusal)(scope, receive, note)
        else:
            try:
                await self.app(scope, body.receive, note)
            finally:
                body.release()
        route = getattr(scope.get("route"), "path", "unknown")
        self.metrics.requests.labels(route, statuses[-1]).inc()
        self.metrics.seconds.labels(route).observe(time.perf_counter() - began)

    def _check(self, request: Request, body: "BoundedBody") -> None:
        headers, key = request.headers, self.settings.api_key
        if key is None:
            check_names(headers, self.settings.allowed_hosts)
        elif request.url.path not in _OPEN:
            check_key(headers, key)
        check_content_type(headers)
        announced = headers.get("content-length", "")
        if announced.isdecimal():
            body.check(int(announced))


@dataclass(slots=True)
class BufferedBytes:
    """Bytes of all bodies that the server holds."""

    held: int = 0


class BoundedBody:
    """``receive`` of one call, within the limits."""

    def __init__(self, receive: Receive, limits: LimitsConfig, buffered: BufferedBytes) -> None:
        self._receive, self._limits, self._buffered = receive, limits, buffered
        self._num_bytes = 0
        self._is_whole = False

    async def receive(self) -> Message:
        """The next part of the body, or the caller's end. Errors: ``Refusal``."""
        if self._is_whole:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), self._limits.idle_timeout_s)
        except TimeoutError as error:
            problem = f"nothing came for {self._limits.idle_timeout_s:g} s"
            remedy = f"Send the body at once, or raise {_LIMITS}.idle_timeout_s."
            raise Refusal(problem, code="body-too-slow", key="body", remedy=remedy) from error
        part = len(message.get("body", b""))
        self.check(self._num_bytes + part)
        self._num_bytes += part
        self._buffered.held += part
        self._is_whole = not message.get("more_body", False)
        return message

    def check(self, num_bytes: int) -> None:
        """Raise ``Refusal`` where a body of ``num_bytes``, some of them already held, is above the limits."""
        if num_bytes > self._limits.max_body_bytes:
            remedy = f"Split the call, or raise {_LIMITS}.max_body_bytes."
            problem = f"has more than {self._limits.max_body_bytes} bytes"
            raise Refusal(problem, code="body-too-large", key="body", remedy=remedy)
        if self._buffered.held - self._num_bytes + num_bytes > self._limits.max_buffered_bytes:
            remedy = f"Ask again later, or raise {_LIMITS}.max_buffered_bytes."
            problem = f"the bodies of all calls have {self._buffered.held} bytes"
            raise Refusal(problem, code="server-busy", key="body", remedy=remedy)

    def release(self) -> None:
        """The call has ended."""
        self._buffered.held -= self._num_bytes
        self._num_bytes = 0
