"""HTTP calls to one rollout server, each over a connection of its own.

Sockets that idle while the learner learns die in silence; a fresh connection per call is never one of them. Nothing
here tries again: whoever calls knows whether a call may be repeated.
"""

import base64
import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
import requests
from requests.structures import CaseInsensitiveDict
from requests.utils import get_environ_proxies, get_netrc_auth

from rollmatch.config.connection import is_loopback
from rollmatch.dialects.calls import BackgroundCall, PostCall, PostRequest, RunningCall
from rollmatch.errors import RolloutError

CONNECT_TIMEOUT_S = 10.0
JSON, MSGPACK = "application/json", "application/msgpack"
REMEDY = "Look at the server's own output; start it again and resume the run."
_LONGEST_TEXT = 300


class TransportFailed(RolloutError):
    """The connection to the server holds from the question to the end of the answer."""

    code = "transport-failed"


class CallTimeout(RolloutError):
    """The server answers a call with a time limit within it."""

    code = "call-timeout"


class ServerRefused(RolloutError):
    """The server accepts the call; ``code`` is the server's own if it sent one."""

    code = "server-refused"

    def __init__(self, problem: str, *, key: str = "", remedy: str = "") -> None:
        super().__init__(problem, key=key, remedy=remedy)
        self.status = 0
        self.item: int | None = None


class ReplyMalformed(RolloutError):
    """A reply is what the dialect says, and holds ids for every request."""

    code = "reply-malformed"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReply:
    """A reply with status 200."""

    body: Any
    headers: Mapping[str, str]


class _RawReply(NamedTuple):
    """A reply before it is decoded, by either kind of call."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def start(self) -> str:
        """Of its text."""
        return self.content.decode(errors="replace")[:_LONGEST_TEXT]


class HttpServer:
    """One rollout server, by the prefix of its routes."""

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        """A user and password in ``base_url`` become a header: the URL stands in messages and in the journal."""
        url = urlsplit(base_url.rstrip("/"))
        user, _, address = url.netloc.rpartition("@")
        self.base_url = url._replace(netloc=address).geturl()
        self.host = url.hostname or ""
        self._headers: dict[str, str] = {}
        if user:
            self._headers = {"Authorization": f"Basic {base64.b64encode(unquote(user).encode()).decode()}"}
        if api_key:
            self._headers = {"Authorization": f"Bearer {api_key}"}

    def get(self, path: str, *, timeout_s: float) -> HttpReply:
        """Ask. Errors: ``TransportFailed``, ``CallTimeout``, ``ServerRefused``, ``ReplyMalformed``."""
        return self._call("GET", path, timeout_s=timeout_s)

    def post(self, path: str, body: Any = None, *, timeout_s: float | None, content_type: str = JSON) -> HttpReply:
        """Tell, once. Errors as for ``get``."""
        return self._call(
            "POST", path, timeout_s=timeout_s, data=_encoded(body, content_type), content_type=content_type
        )

    def begin(self, path: str, body: Any, *, timeout_s: float, content_type: str = JSON) -> RunningCall[HttpReply]:
        """As ``post``, but under way when this returns; its errors come with its result."""
        if not self._is_straight:
            return BackgroundCall(partial(self.post, path, body, timeout_s=timeout_s, content_type=content_type))
        url = urlsplit(self.base_url)
        question = PostRequest(
            path=url.path + path,
            data=_encoded(body, content_type),
            headers=self._headers | {"Content-Type": content_type},
            connect_timeout_s=min(CONNECT_TIMEOUT_S, timeout_s),
            timeout_s=timeout_s,
        )

        def read(answer: http.client.HTTPResponse) -> HttpReply:
            headers = CaseInsensitiveDict(answer.getheaders())
            return self._answer(path, _RawReply(answer.status, headers, answer.read()))

        def failed(error: Exception, was_sent: bool) -> RolloutError:
            if isinstance(error, TimeoutError) and was_sent:
                return self._late(path, timeout_s)
            return self._broken(path, error)

        return PostCall((self.host, url.port), question, read=read, failed=failed)

    @cached_property
    def _is_straight(self) -> bool:
        """Whether nothing but a connection lies between: no encryption, no proxy, no password of the environment."""
        url = urlsplit(self.base_url)
        if url.scheme != "http" or self._headers.get("Authorization", "").startswith("Basic"):
            return False
        return is_loopback(self.host) or not (get_environ_proxies(self.base_url) or get_netrc_auth(self.base_url))

    def status_of(self, path: str, *, timeout_s: float) -> int:
        """The status of a GET. Errors: ``TransportFailed``, ``CallTimeout``."""
        return self._send("GET", path, timeout_s=timeout_s).status_code

    def _call(self, method: str, path: str, **sent: Any) -> HttpReply:
        return self._answer(path, self._send(method, path, **sent))

    def _answer(self, path: str, response: _RawReply) -> HttpReply:
        if response.status_code != requests.codes.ok:
            raise _refusal(self.base_url, path, response)
        return HttpReply(body=self._decode(path, response), headers=response.headers)

    def _send(
        self, method: str, path: str, *, timeout_s: float | None, data: bytes | None = None, content_type: str = ""
    ) -> _RawReply:
        headers = self._headers | ({"Content-Type": content_type} if data is not None else {})
        limits = (CONNECT_TIMEOUT_S if timeout_s is None else min(CONNECT_TIMEOUT_S, timeout_s), timeout_s)
        with requests.Session() as session:
            session.trust_env = not is_loopback(self.host)  # a proxy of the environment cannot reach this machine
            try:
                reply = session.request(method, self.base_url + path, data=data, headers=headers, timeout=limits)
            except requests.ReadTimeout as error:
                raise self._late(path, timeout_s or 0.0) from error
            except requests.RequestException as error:
                raise self._broken(path, error) from error
        return _RawReply(reply.status_code, reply.headers, reply.content)

    def _late(self, path: str, timeout_s: float) -> CallTimeout:
        problem = f"{self.base_url}{path} did not answer within {timeout_s:g} s"
        return CallTimeout(problem, key=self.base_url, remedy=REMEDY)

    def _broken(self, path: str, error: Exception) -> TransportFailed:
        return TransportFailed(f"{path}: {_root_of(error)}", key=self.base_url, remedy=REMEDY)

    def _decode(self, path: str, response: _RawReply) -> Any:
        try:
            return _read(response)
        except ValueError as error:
            problem = f"{path} answered with status 200, but not in the format of its dialect: {response.start!r}"
            raise ReplyMalformed(problem, key=self.base_url, remedy="Is this URL a rollout server's?") from error


def _encoded(body: Any, content_type: str) -> bytes | None:
    encode = msgspec.msgpack.encode if content_type == MSGPACK else msgspec.json.encode
    return None if body is None else encode(body)


def _read(response: _RawReply) -> Any:
    """Its body; msgspec's and json's errors are both ``ValueError``."""
    if response.headers.get("Content-Type", "").startswith(MSGPACK):
        return msgspec.msgpack.decode(response.content)
    return json.loads(response.content) if response.content else None


def _refusal(base_url: str, path: str, response: _RawReply) -> ServerRefused:
    """A server's no, in its own words where it has some."""
    try:
        body = _read(response)
    except ValueError:
        body = None
    if isinstance(body, dict) and isinstance(body.get("code"), str):
        problem, key = str(body.get("problem", "")), str(body.get("key") or "")
        error = ServerRefused(f"{base_url}{path}: {problem}", key=key or base_url, remedy=str(body.get("remedy", "")))
        error.code = body["code"]
        error.item = body["item"] if isinstance(body.get("item"), int) else None
    else:
        text = response.start.strip()
        error = ServerRefused(f"{base_url}{path} answered {response.status_code}: {text}", key=base_url)
    error.status = response.status_code
    return error


def _root_of(error: BaseException) -> str:
    """The innermost reason, without the wrappings of the HTTP library."""
    seen = {id(error)}
    while (below := error.__cause__ or error.__context__) is not None and id(below) not in seen:
        seen.add(id(below))
        error = below
    return f"{type(error).__name__}: {error}"
