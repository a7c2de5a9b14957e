"""HTTP calls to one rollout server, each over a connection of its own.

Sockets that idle while the learner learns die in silence; a fresh connection per call is never one of them. Nothing
here is repeated: the caller knows whether a call may be. While weights travel, the threads of one interpreter wait for
each other; calls that are only sent (``begin``) delay the last server less than threads and sessions.

A socket's own time limit is that of one read: a server that sends a byte now and then would hold a call for ever. So a
connection is shut when the time of its whole call is over, and a reply has a largest size.
"""

import base64
import copy
import http.client
import json
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, Self, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

import msgspec
import requests
import urllib3
from requests.adapters import HTTPAdapter
from requests.structures import CaseInsensitiveDict
from requests.utils import get_environ_proxies, get_netrc_auth
from urllib3.util.wait import wait_for_read

from rollmatch.config.connection import is_loopback
from rollmatch.dialects.calls import BackgroundCall
from rollmatch.errors import RolloutError, kind_and_text

CONNECT_TIMEOUT_S = 10.0
"""Until a server has accepted a connection."""
CALL_HEADER = "x-call-id"
"""Header by which our server reports the progress of a call; the caller chooses its value."""
JSON, MSGPACK = "application/json", "application/msgpack"
MOVED = {"GET": (301, 302, 303, 307, 308), "POST": (307, 308)}
"""The same call at another place: after the others, a POST would be a GET without its body."""
REPLY_S = 300.0
REPLY_BYTES, TOKEN_BYTES = 64 << 20, 1 << 10
"""Longest reply, and what is added for each token that its call asks for."""
_CHUNK_BYTES = 1 << 16
_AS_IT_IS = {"Accept-Encoding": "identity"}
"""A few packed bytes may hold many."""
REMEDY = "Look at the server's own output; start it again and resume the run."
_LONGEST_TEXT, _LONGEST_FIELD = 300, 4000
"""Characters of a reply that stand in a message: where it has no form, and of each field of an error."""
_CODE = re.compile("[a-z][a-z0-9-]{0,99}")
Outcome = TypeVar("Outcome", covariant=True)


class TransportFailed(RolloutError):
    """The connection to the server broke between the question and the end of the answer."""

    code = "transport-failed"


class CallTimeout(RolloutError):
    """The server did not answer a call within its time limit."""

    code = "call-timeout"


class ServerRefused(RolloutError):
    """The server refused the call; ``code`` is the server's own if it sent one."""

    code = "server-refused"

    def __init__(self, problem: str, *, key: str = "", remedy: str = "") -> None:
        super().__init__(problem, key=key, remedy=remedy)
        self.status = 0
        self.item: int | None = None


class ReplyMalformed(RolloutError):
    """A reply is not what the dialect says, or holds no ids for a request."""

    code = "reply-malformed"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReply:
    """A reply with status 200."""

    body: Any
    headers: Mapping[str, str]


class _Call(NamedTuple):
    """What is sent."""

    method: str
    path: str
    data: bytes | None = None
    content_type: str = ""


class _RawReply(NamedTuple):
    """A reply before it is decoded, by either kind of call."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def start(self) -> str:
        """Of its text."""
        return self.content.decode(errors="replace")[:_LONGEST_TEXT]


class RunningCall(Protocol[Outcome]):
    """A call that may still be running."""

    def is_done(self, *, within_s: float = 0.0) -> bool:
        """Whether it has ended, after waiting for so long at most."""

    def result(self) -> Outcome:
        """Wait for its result, or raise its error."""


def raise_failures(calls: Sequence[RunningCall[object]]) -> None:
    """Errors: that of the first call that has ended with one."""
    for call in calls:
        if call.is_done():
            call.result()


class HttpServer:
    """One rollout server, by the prefix of its routes."""

    def __init__(self, base_url: str, *, api_key: str | None = None, reply_s: float = REPLY_S) -> None:
        """A user and password in ``base_url`` become a header: the URL stands in messages and in the journal.

        ``reply_s``: from the first byte of a reply to its last, for calls without a time limit.
        """
        self._reply_s = reply_s
        url = urlsplit(base_url.rstrip("/"))
        user, _, address = url.netloc.rpartition("@")
        self.base_url = url._replace(netloc=address).geturl()
        self._is_local = is_loopback(url.hostname or "")
        self._headers: dict[str, str] = {}
        if user:
            self._headers = {"Authorization": f"Basic {base64.b64encode(unquote(user).encode()).decode()}"}
        if api_key:
            self._headers = {"Authorization": f"Bearer {api_key}"}

    def naming(self, call_id: str) -> "HttpServer":
        """The same server, for the calls of this id."""
        named = copy.copy(self)
        named._headers = self._headers | {CALL_HEADER: call_id}
        return named

    def get(self, path: str, *, timeout_s: float) -> HttpReply:
        """Errors: ``TransportFailed``, ``CallTimeout``, ``ServerRefused``, ``ReplyMalformed``."""
        return _reply_of(self.base_url, path, self._send(_Call("GET", path), timeout_s=timeout_s))

    def post(
        self,
        path: str,
        body: object = None,
        *,
        timeout_s: float | None,
        content_type: str = JSON,
        num_tokens: int = 0,
    ) -> HttpReply:
        """Send once; ``num_tokens``: most that the reply may name. Errors as for ``get``."""
        data, most = _encoded(body, content_type), REPLY_BYTES + num_tokens * TOKEN_BYTES
        raw = self._send(_Call("POST", path, data, content_type), timeout_s=timeout_s, most=most)
        return _reply_of(self.base_url, path, raw)

    def begin(self, path: str, body: object, *, timeout_s: float, content_type: str = JSON) -> RunningCall[HttpReply]:
        """As ``post``, but under way when this returns; its errors come with its result."""
        if not self._is_straight:
            return BackgroundCall(partial(self.post, path, body, timeout_s=timeout_s, content_type=content_type))
        headers = self._headers | {"Content-Type": content_type}
        return PostCall(self.base_url, path, _encoded(body, content_type), headers, timeout_s=timeout_s)

    @cached_property
    def _is_straight(self) -> bool:
        """Whether nothing but a connection lies between: no encryption, no proxy, no password of the environment."""
        url = urlsplit(self.base_url)
        if url.scheme != "http" or self._headers.get("Authorization", "").startswith("Basic"):
            return False
        return self._is_local or not (get_environ_proxies(self.base_url) or get_netrc_auth(self.base_url))

    def status_of(self, path: str, *, timeout_s: float) -> int:
        """The status of a GET. Errors: ``TransportFailed``, ``CallTimeout``."""
        return self._send(_Call("GET", path), timeout_s=timeout_s).status_code

    def _send(self, call: _Call, *, timeout_s: float | None, most: int = REPLY_BYTES) -> _RawReply:
        """``most``: bytes of the reply."""
        path, headers = call.path, self._headers | _AS_IT_IS
        if call.data is not None:
            headers["Content-Type"] = call.content_type
        limits = (CONNECT_TIMEOUT_S if timeout_s is None else min(CONNECT_TIMEOUT_S, timeout_s), timeout_s)
        limit, url = _TimeLimit(timeout_s, reply_s=self._reply_s), self.base_url + path
        with limit, _StraightSession() as session:
            session.trust_env = not self._is_local  # a proxy of the environment cannot reach this machine
            for scheme in ("http://", "https://"):
                session.mount(scheme, _LimitedAdapter(limit))
            try:
                ask = partial(
                    session.request, call.method, data=call.data, headers=headers, timeout=limits, stream=True
                )
                reply = _followed(ask, url, MOVED[call.method])
                limit.reply_begins()
                parts = reply.raw.stream(_CHUNK_BYTES, decode_content=False)
                content = _joined(parts, most, self.base_url, path)
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, UnicodeError) as error:
                if limit.is_over or isinstance(error, requests.ReadTimeout | urllib3.exceptions.ReadTimeoutError):
                    raise _late(self.base_url, path, limit.seconds) from error
                raise _broken(self.base_url, path, error) from error
        if limit.is_over:  # what ends with its connection looks whole
            raise _late(self.base_url, path, limit.seconds)
        return _RawReply(reply.status_code, reply.headers, content)


class _TimeLimit:
    """Shuts the connections of one call when its time is over; without a limit, ``reply_s`` after its reply began."""

    def __init__(self, seconds: float | None, *, reply_s: float = REPLY_S) -> None:
        self.seconds, self.is_over = reply_s if seconds is None else seconds, False
        self._connections: list[http.client.HTTPConnection] = []
        self._sockets: list[socket.socket] = []
        """Of replies, which their connections forget."""
        self._timer = threading.Timer(self.seconds, self._end)
        self._timer.daemon = True
        if seconds is not None:
            self._timer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def covers(self, connection: http.client.HTTPConnection) -> None:
        """It ends with the call."""
        self._connections.append(connection)

    def covers_reply(self, connection: http.client.HTTPConnection) -> None:
        """What is read from its socket ends with the call."""
        self._sockets.append(connection.sock)

    def reply_begins(self) -> None:
        """Its first bytes are there."""
        if not (self._timer.is_alive() or self.is_over):
            self._timer.start()

    def _end(self) -> None:
        self.is_over = True
        for one in (*self._sockets, *(connection.sock for connection in self._connections)):
            with suppress(OSError, AttributeError):  # closed, or not open yet
                one.shutdown(socket.SHUT_RDWR)


class _StraightSession(requests.Session):
    """Follows no redirect. With ``allow_redirects=False``, requests would read the whole body of one, however long."""

    def get_redirect_target(self, resp: requests.Response) -> None:
        """None."""


class _LimitedAdapter(HTTPAdapter):
    """Connections that a ``_TimeLimit`` covers."""

    def __init__(self, limit: _TimeLimit) -> None:
        super().__init__()
        self._limit = limit

    def get_connection_with_tls_context(self, *arguments: Any, **keywords: Any) -> Any:
        """As requests' own."""
        pool = super().get_connection_with_tls_context(*arguments, **keywords)
        pool.ConnectionCls = partial(self._connection, pool.ConnectionCls)  # type: ignore[assignment]
        return pool

    def _connection(self, kind: Callable[..., Any], **keywords: Any) -> Any:
        connection = kind(**keywords)
        read_head = connection.getresponse

        def getresponse() -> Any:
            self._limit.covers_reply(connection)
            if not isinstance(connection.sock, ssl.SSLSocket):  # there, bytes may be none of the reply
                wait_for_read(connection.sock, connection.sock.gettimeout())
                self._limit.reply_begins()
            return read_head()

        connection.getresponse = getresponse
        self._limit.covers(connection)
        return connection


class PostCall:
    """A POST over plain HTTP that is sent at once and read when its result is wanted; a ``RunningCall``."""

    def __init__(
        self, base_url: str, path: str, data: bytes | None, headers: Mapping[str, str], *, timeout_s: float
    ) -> None:
        self._base_url, self._path, self._timeout_s = base_url, path, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._outcome: HttpReply | RolloutError | None = None
        url = urlsplit(base_url)
        connect_timeout_s = min(CONNECT_TIMEOUT_S, timeout_s)
        self._connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=connect_timeout_s)
        self._poll = select.poll()
        try:
            self._connection.request("POST", url.path + path, data, headers)
        except (OSError, http.client.HTTPException) as error:
            self._outcome = _broken(base_url, path, error)
            self._connection.close()
        else:
            self._poll.register(self._connection.sock, select.POLLIN)

    def is_done(self, *, within_s: float = 0.0) -> bool:
        """As the protocol; a reply that has begun is waited for."""
        if self._outcome is None and self._poll.poll(within_s * 1000):
            self._outcome = self._read()
        return self._outcome is not None

    def result(self) -> HttpReply:
        """As the protocol."""
        if self._outcome is None:
            self._outcome = self._read()
        if isinstance(self._outcome, RolloutError):
            raise self._outcome
        return self._outcome

    def _read(self) -> HttpReply | RolloutError:
        outcome: HttpReply | RolloutError
        self._connection.sock.settimeout(None)
        with _TimeLimit(max(0.001, self._deadline - time.monotonic())) as limit:
            limit.covers_reply(self._connection)
            try:
                reply = self._connection.getresponse()
                parts = iter(partial(reply.read, _CHUNK_BYTES), b"")
                content = _joined(parts, REPLY_BYTES, self._base_url, self._path)
                headers = CaseInsensitiveDict(reply.getheaders())
                outcome = _reply_of(self._base_url, self._path, _RawReply(reply.status, headers, content))
            except RolloutError as error:
                outcome = error
            except (OSError, http.client.HTTPException) as error:
                outcome = _broken(self._base_url, self._path, error)
            finally:
                self._connection.close()
        return _late(self._base_url, self._path, self._timeout_s) if limit.is_over else outcome


def _followed(ask: Callable[[str], requests.Response], url: str, moved: Sequence[int]) -> requests.Response:
    """The reply, after one redirect at most, as a router writes a route's last slash; none leads to another server."""
    reply = ask(url)
    target = urljoin(url, reply.headers.get("Location", ""))
    if reply.status_code not in moved or urlsplit(target)[:2] != urlsplit(url)[:2]:
        return reply
    reply.close()
    return ask(target)


def _joined(parts: Iterable[bytes], most: int, base_url: str, path: str) -> bytes:
    """A reply of ``most`` bytes at most. Errors: ``ReplyMalformed``."""
    content = bytearray()
    for part in parts:
        content += part
        if len(content) > most:
            problem = f"{path} answered with more than {most >> 20} MiB"
            raise ReplyMalformed(problem, key=base_url, remedy="Is this URL a rollout server's?")
    return bytes(content)


def _encoded(body: object, content_type: str) -> bytes | None:
    encode = msgspec.msgpack.encode if content_type == MSGPACK else msgspec.json.encode
    return None if body is None else encode(body)


def _read(response: _RawReply) -> object:
    """Its body; msgspec's and json's errors are both ``ValueError``, but for too many lists in each other."""
    if response.headers.get("Content-Type", "").startswith(MSGPACK):
        return msgspec.msgpack.decode(response.content)
    return json.loads(response.content) if response.content else None


def _reply_of(base_url: str, path: str, raw: _RawReply) -> HttpReply:
    """Errors: ``ServerRefused``, ``ReplyMalformed``."""
    if raw.status_code != requests.codes.ok:
        raise _refusal(base_url, path, raw)
    try:
        return HttpReply(body=_read(raw), headers=raw.headers)
    except (ValueError, RecursionError) as error:
        problem = f"{path} answered with status 200, but not in the format of its dialect: {raw.start!r}"
        raise ReplyMalformed(problem, key=base_url, remedy="Is this URL a rollout server's?") from error


def _late(base_url: str, path: str, timeout_s: float) -> CallTimeout:
    problem = f"{base_url}{path} did not answer within {timeout_s:g} s"
    return CallTimeout(problem, key=base_url, remedy=REMEDY)


def _broken(base_url: str, path: str, error: Exception) -> TransportFailed:
    return TransportFailed(f"{path}: {_root_of(error)}", key=base_url, remedy=REMEDY)


def _refusal(base_url: str, path: str, response: _RawReply) -> ServerRefused:
    """A server's no, in its own words where it has some."""
    try:
        body = _read(response)
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict) and isinstance(body.get("code"), str) and _CODE.fullmatch(body["code"]):
        problem, key, remedy = (str(body.get(name) or "")[:_LONGEST_FIELD] for name in ("problem", "key", "remedy"))
        error = ServerRefused(f"{base_url}{path}: {problem}", key=key or base_url, remedy=remedy)
        error.code = body["code"]
        error.item = body["item"] if isinstance(body.get("item"), int) else None
    else:
        text = response.start.strip()
        place = response.headers.get("Location", "")[:_LONGEST_TEXT]
        text, remedy = (f"redirected to {place}", "Name the server's own URL.") if place else (text, "")
        error = ServerRefused(f"{base_url}{path} answered {response.status_code}: {text}", key=base_url, remedy=remedy)
    error.status = response.status_code
    return error


def _root_of(error: BaseException) -> str:
    """The innermost reason, without the wrappings of the HTTP library."""
    seen = {id(error)}
    while (below := error.__cause__ or error.__context__) is not None and id(below) not in seen:
        seen.add(id(below))
        error = below
    return kind_and_text(error)
