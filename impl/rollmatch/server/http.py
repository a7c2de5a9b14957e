"""HTTP of a server: who may call, how large and slow a body may be, bodies in, answers out, callers that hang up.

A web page can make its reader's browser call 127.0.0.1. The browser then names the page in ``Origin``, or, if the
page's own host name was pointed at 127.0.0.1, that host name in ``Host``; it sends JSON only to servers that agree.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
from fastapi import Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollmatch.config.connection import is_loopback
from rollmatch.config.limits import LimitsConfig
from rollmatch.errors import RollmatchError
from rollmatch.server.failures import Refusal, failure_of, openai_failure_of, status_of
from rollmatch.server.http_protocol import MIN_BYTES_PER_S
from rollmatch.server.payloads import InferReply
from rollmatch.server.reading import Form, read
from rollmatch.server.state import ServerState

MSGPACK = "application/msgpack"
CONTENT_TYPES = ("application/json", MSGPACK, "application/x-msgpack", "application/vnd.msgpack")
OPENAI = ("/v1/", "/inference/")
"""Routes whose callers read errors as OpenAI's clients do, beside our form."""
_OPEN = ("/health/",)
"""Routes that are answered without the key."""
_LIMITS = "custom.extra.rollout_server.limits"
_CLOSED_BY_CALLER = 499
_HEADERS: Mapping[int, Mapping[str, str]] = {
    HTTPStatus.UNAUTHORIZED: {"www-authenticate": "Bearer"},
    HTTPStatus.TOO_MANY_REQUESTS: {"retry-after": "1"},
}
_UNREAD = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
"""Refusals of a body that was not read to its end."""
_LEVELS_IN_STEPS, _VALUES_AT_ONCE, _PIECES_AT_ONCE = 5, 65_536, 1024
_LARGE_BYTES, _SENT_BYTES = 4096, 1 << 20
"""Pieces of a reply that are not copied, and the most that is sent at a time."""
_encoder = msgspec.msgpack.Encoder()
_Body = TypeVar("_Body", bound=BaseModel)
_T = TypeVar("_T")


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
        began, statuses = time.perf_counter(), [int(HTTPStatus.INTERNAL_SERVER_ERROR)]

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
            except ClientDisconnect:  # in the middle of its body: there is nobody to answer
                statuses.append(_CLOSED_BY_CALLER)
            finally:
                body.release()
        route = getattr(scope.get("route"), "path", "unknown")
        self.metrics.requests.labels(route, statuses[-1]).inc()
        self.metrics.seconds.labels(route).observe(time.perf_counter() - began)

    def _check(self, request: Request, body: "BoundedBody") -> None:
        headers, key = request.headers, self.settings.api_key
        if key is None:
            check_names(headers, self.settings.allowed_hosts)
        elif request.scope["path"] not in _OPEN:  # what routes are chosen by; request.url is made from Host, too
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
        self._began: float | None = None

    async def receive(self) -> Message:
        """The next part of the body, or the caller's end. Errors: ``Refusal``."""
        if self._is_whole:
            return await self._receive()
        pause_s, now = self._limits.idle_timeout_s, time.monotonic()
        self._began = self._began or now
        left_s = self._began + pause_s + self._num_bytes / MIN_BYTES_PER_S - now
        try:
            message = await asyncio.wait_for(self._receive(), min(pause_s, max(0.0, left_s)))
        except TimeoutError as error:
            problem = f"nothing came for {pause_s:g} s, or less than {MIN_BYTES_PER_S} bytes per second"
            remedy = f"Send the body at once, or raise {_LIMITS}.idle_timeout_s."
            raise Refusal(problem, code="body-too-slow", key="body", remedy=remedy) from error
        part = len(message.get("body", b""))
        self.check(self._num_bytes + part)
        self._num_bytes += part
        self._buffered.held += part
        self._is_whole = not message.get("more_body")
        return message

    def check(self, num_bytes: int) -> None:
        """Raise ``Refusal`` where a body of ``num_bytes``, some of them already held, is above the limits."""
        if num_bytes > self._limits.max_body_bytes:
            remedy = f"Split the call, or raise {_LIMITS}.max_body_bytes."
            problem = f"has more than {self._limits.max_body_bytes} bytes"
            raise Refusal(problem, code="body-too-large", key="body", remedy=remedy)
        if self._buffered.held - self._num_bytes + num_bytes > self._limits.max_buffered_bytes:
            remedy = f"Try again later, or raise {_LIMITS}.max_buffered_bytes."
            problem = f"the bodies of all calls have {self._buffered.held} bytes"
            raise Refusal(problem, code="server-busy", key="body", remedy=remedy)

    def release(self) -> None:
        """The call has ended."""
        self._buffered.held -= self._num_bytes
        self._num_bytes = 0


def check_key(headers: Mapping[str, str], key: str) -> None:
    """Errors: ``Refusal`` with ``bearer-key-missing`` or ``bearer-key-wrong``."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    remedy = "Send the header Authorization: Bearer KEY with the key the server was started with."
    if kind.lower() != "bearer" or not given:
        problem = "the call brings no bearer key"
        raise Refusal(problem, code="bearer-key-missing", key="authorization", remedy=remedy)
    if not hmac.compare_digest(given.strip().encode(), key.encode()):
        problem = "the call's bearer key is not this server's"
        raise Refusal(problem, code="bearer-key-wrong", key="authorization", remedy=remedy)


def check_names(headers: Mapping[str, str], allowed: Iterable[str]) -> None:
    """Host and Origin of a call to a server without a key. Errors: ``Refusal`` with ``host-`` or ``origin-refused``.

    An address in ``Host`` is fine: a page whose host name was pointed at this server sends that name. In ``Origin`` it
    is not: pages are served by addresses, too.
    """
    names = frozenset(name.lower() for name in allowed)
    host, origin = headers.get("host", ""), headers.get("origin")
    remedy = (
        "Call it by its address, allow the name (custom.extra.rollout_server.allowed_hosts, or --allowed-hosts of "
        "vllm-serve), or set a key."
    )
    is_plain = not set(host) & set("@/?#\\")  # else a URL's host is only a part of it
    if not (is_plain and (_is_address(f"//{host}") or _is_known(f"//{host}", names))):
        raise Refusal(f"the call is for host {host!r}", code="host-refused", key="host", remedy=remedy)
    if origin is not None and not _is_known(origin, names):
        raise Refusal(f"the call comes from a page of {origin!r}", code="origin-refused", key="origin", remedy=remedy)


def check_content_type(headers: Mapping[str, str]) -> None:
    """A body says that it is JSON or msgpack. Errors: ``Refusal`` with ``content-type-refused``."""
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if has_body and kind not in CONTENT_TYPES:
        remedy = f"Send {CONTENT_TYPES[0]} or {CONTENT_TYPES[1]}."
        raise Refusal(f"is {kind!r}", code="content-type-refused", key="content-type", remedy=remedy)


def _is_address(url: str) -> bool:
    """Whether a URL names its host by an IP address.

    >>> [_is_address(f"//{host}") for host in ("10.0.0.1:8000", "[::]:8000", "0.0.0.0", "evil.example", "")]
    [True, True, True, False, False]
    """
    try:
        ipaddress.ip_address(urlsplit(url).hostname or "")
    except ValueError:
        return False
    return True


@lru_cache(maxsize=256)
def _is_known(url: str, names: frozenset[str]) -> bool:
    """Cached: every call of a learner brings the same names."""
    try:
        host = (urlsplit(url).hostname or "").lower()
    except ValueError:
        return False
    return is_loopback(host) or host in names


async def read_body(
    request: Request,
    kind: type[_Body],
    *,
    sampling_at: tuple[str, ...] = ("sampling",),
    longest: Mapping[str, int] | None = None,
) -> _Body:
    """The body as a payload; none at all counts as an empty one.

    ``longest``: field -> most entries, counted before they are validated. Errors: ``Refusal``.
    """
    form = Form(kind=kind, packed=is_msgpack(request), sampling_at=sampling_at, longest=longest or {})
    limits: LimitsConfig = request.app.state.limits
    return cast(_Body, await read(await request.body(), form, max_bytes=limits.max_body_bytes))


def is_msgpack(request: Request) -> bool:
    """Whether the caller writes msgpack, and so reads it."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() in CONTENT_TYPES[1:]


def check_json(request: Request) -> None:
    """Errors: ``Refusal`` with ``content-type-refused``, for routes that read no msgpack."""
    if is_msgpack(request):
        problem, remedy = "is msgpack", f"Send {CONTENT_TYPES[0]}."
        raise Refusal(problem, code="content-type-refused", key="content-type", remedy=remedy)


def answer(request: Request, reply: BaseModel | dict[str, Any] | list[Any], *, status: int = HTTPStatus.OK) -> Response:
    """A reply in the caller's own encoding."""
    if is_msgpack(request):
        fields = reply.model_dump() if isinstance(reply, BaseModel) else reply
        return Response(_encoder.encode(fields), media_type=MSGPACK, status_code=status)
    parts = deque(_joined(_pieces(_plain(reply), _LEVELS_IN_STEPS)))
    if len(parts) == 1:
        return Response(parts[0], media_type=CONTENT_TYPES[0], status_code=status)
    headers = {"content-length": str(sum(map(len, parts)))}
    return StreamingResponse(_taken(parts), media_type=CONTENT_TYPES[0], status_code=status, headers=headers)


async def _taken(parts: deque[bytes | memoryview]) -> AsyncIterator[bytes]:
    """A large reply in parts: of what it is given, a transport keeps a copy until it is sent."""
    while parts:
        part = memoryview(parts.popleft())
        for start in range(0, len(part), _SENT_BYTES):
            yield bytes(part[start : start + _SENT_BYTES])


def written(request: Request, value: object) -> msgspec.Raw:
    """A part of a reply in the caller's own encoding, which takes less memory than its objects."""
    return msgspec.Raw(_encoder.encode(value) if is_msgpack(request) else encoded(value))


def encoded(value: object) -> bytes:
    """A value as JSON, made in small steps: an encoder keeps the interpreter lock, and with it the event loop.

    >>> encoded({"a": [{"b": [1, None]}, 2], "c": {}})
    b'{"a":[{"b":[1,null]},2],"c":{}}'
    """
    return b"".join(_pieces(value, _LEVELS_IN_STEPS))


def _joined(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes in fewer pieces; large ones are not copied."""
    small: list[bytes | memoryview] = []
    for piece in pieces:
        if len(piece) < _LARGE_BYTES:
            small.append(piece)
        if len(piece) >= _LARGE_BYTES or len(small) == _PIECES_AT_ONCE:
            yield b"".join(small)
            small.clear()
        if len(piece) >= _LARGE_BYTES:
            yield piece
    yield b"".join(small)


def _pieces(value: object, levels: int) -> Iterator[bytes | memoryview]:
    if isinstance(value, msgspec.Raw):
        yield memoryview(value)
    elif not levels or not value or not isinstance(value, dict | list):
        yield msgspec.json.encode(value)
    elif isinstance(value, dict):
        for place, (name, field) in enumerate(value.items()):
            yield (b"," if place else b"{") + msgspec.json.encode(name) + b":"
            yield from _pieces(field, levels - 1)
        yield b"}"
    else:
        are_deep = any(isinstance(entry, dict | list) for entry in value[:1])
        size = 1 if are_deep else _VALUES_AT_ONCE
        for start in range(0, len(value), size):
            yield b"," if start else b"["
            if are_deep:
                yield from _pieces(value[start], levels - 1)
            else:
                yield msgspec.json.encode(value[start : start + size])[1:-1]
        yield b"]"


def refuse(request: Request, error: RollmatchError) -> Response:
    """An error as a reply; after a body that was not read to its end, the connection is closed."""
    status = status_of(error)
    headers = dict(_HEADERS.get(status, {}))
    if status in _UNREAD:
        headers["connection"] = "close"
    fields = failure_of(error).model_dump()
    if request.scope["path"].startswith(OPENAI):
        fields["error"] = openai_failure_of(error)
    if is_msgpack(request):
        return Response(_encoder.encode(fields), media_type=MSGPACK, status_code=status, headers=headers)
    return JSONResponse(fields, status_code=status, headers=headers)


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T | Response:
    """The work's result; cancelled as soon as the caller hangs up. To be called after the body was read."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=_CLOSED_BY_CALLER)
    finally:
        gone.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, RollmatchError):
            await task


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _plain(reply: BaseModel | dict[str, object] | list[object]) -> object:
    """Without bytes, which JSON does not have."""
    if isinstance(reply, InferReply):
        fields = reply.model_dump(exclude={"responses"})
        return fields | {"responses": [response.listed() for response in reply.responses]}
    return reply.model_dump() if isinstance(reply, BaseModel) else reply
