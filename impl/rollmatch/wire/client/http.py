"""HTTP calls to one rollout server, each over a connection of its own.

Sockets that idle while the learner learns die in silence; a fresh connection per call costs a millisecond and is
never one of them. Nothing here tries again: whoever calls knows whether a call may be repeated.
"""

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
import requests

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
    """The server does what it is asked; ``code`` is the server's own where it has one."""

    code = "server-refused"

    def __init__(self, problem: str, *, key: str = "", remedy: str = "") -> None:
        super().__init__(problem, key=key, remedy=remedy)
        self.status = 0
        self.item: int | None = None


class ReplyMalformed(RolloutError):
    """A reply is what the dialect says, and holds ids for every request."""

    code = "reply-malformed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A reply with status 200."""

    body: Any
    headers: Mapping[str, str]


class HttpServer:
    """One rollout server, by the prefix of its routes."""

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self.host = urlsplit(self.base_url).hostname or ""
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str, *, timeout_s: float) -> Answer:
        """Ask. Errors: ``TransportFailed``, ``CallTimeout``, ``ServerRefused``, ``ReplyMalformed``."""
        return self._call("GET", path, timeout_s=timeout_s)

    def post(self, path: str, body: Any = None, *, timeout_s: float | None, content_type: str = JSON) -> Answer:
        """Tell, once. Errors as for ``get``."""
        encode = msgspec.msgpack.encode if content_type == MSGPACK else msgspec.json.encode
        data = None if body is None else encode(body)
        return self._call("POST", path, timeout_s=timeout_s, data=data, content_type=content_type)

    def status_of(self, path: str, *, timeout_s: float) -> int:
        """The status of a GET. Errors: ``TransportFailed``, ``CallTimeout``."""
        return self._send("GET", path, timeout_s=timeout_s).status_code

    def _call(self, method: str, path: str, **sent: Any) -> Answer:
        response = self._send(method, path, **sent)
        if response.status_code != requests.codes.ok:
            raise _refusal(self.base_url, path, response)
        return Answer(body=self._decode(path, response), headers=response.headers)

    def _send(
        self, method: str, path: str, *, timeout_s: float | None, data: bytes | None = None, content_type: str = ""
    ) -> requests.Response:
        headers = self._headers | ({"Content-Type": content_type} if data is not None else {})
        limits = (CONNECT_TIMEOUT_S if timeout_s is None else min(CONNECT_TIMEOUT_S, timeout_s), timeout_s)
        with requests.Session() as session:
            session.trust_env = not is_loopback(self.host)  # a proxy of the environment cannot reach this machine
            try:
                return session.request(method, self.base_url + path, data=data, headers=headers, timeout=limits)
            except requests.ReadTimeout as error:
                problem = f"{self.base_url}{path} did not answer within {timeout_s:g} s"
                raise CallTimeout(problem, key=self.base_url, remedy=REMEDY) from error
            except requests.RequestException as error:
                raise TransportFailed(f"{path}: {_root_of(error)}", key=self.base_url, remedy=REMEDY) from error

    def _decode(self, path: str, response: requests.Response) -> Any:
        try:
            return _read(response)
        except ValueError as error:
            start = response.text[:_LONGEST_TEXT]
            problem = f"{path} answered with status 200, but not in the format of its dialect: {start!r}"
            raise ReplyMalformed(problem, key=self.base_url, remedy="Is this URL a rollout server's?") from error


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by name or address.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "10.0.0.1", "example.org")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _read(response: requests.Response) -> Any:
    """Its body; msgspec's and json's errors are both ``ValueError``."""
    if response.headers.get("Content-Type", "").startswith(MSGPACK):
        return msgspec.msgpack.decode(response.content)
    return json.loads(response.content) if response.content else None


def _refusal(base_url: str, path: str, response: requests.Response) -> ServerRefused:
    """A server's no, in its own words where it has some."""
    try:
        told = _read(response)
    except ValueError:
        told = None
    if isinstance(told, dict) and isinstance(told.get("code"), str):
        problem, key = str(told.get("problem", "")), str(told.get("key") or "")
        error = ServerRefused(f"{base_url}{path}: {problem}", key=key or base_url, remedy=str(told.get("remedy", "")))
        error.code = told["code"]
        error.item = told["item"] if isinstance(told.get("item"), int) else None
    else:
        text = response.text[:_LONGEST_TEXT].strip()
        error = ServerRefused(f"{base_url}{path} answered {response.status_code}: {text}", key=base_url)
    error.status = response.status_code
    return error


def _root_of(error: BaseException) -> str:
    """The innermost reason, without the wrappings of the HTTP library."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return f"{type(error).__name__}: {error}"
