"""Calls over HTTP to a server that nobody need trust: what it sends back is bounded in size, time and place."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
import urllib3

REPLY_BYTES, RUN_BYTES = 8 << 20, 128 << 20
"""That are read of one reply, and in all of a run."""
CHUNK = 1 << 16
LATE_S = 1.0
"""For a timeout to be noticed where it is watched, before the caller stops waiting."""
MOVED, KEEPS_METHOD = (301, 302, 303, 307, 308), (307, 308)
AS_IT_IS: Mapping[str, str] = {"Accept-Encoding": "identity"}
"""A few packed bytes may hold many."""


class Unbounded(requests.RequestException):
    """A reply has no end, or the server sends the caller elsewhere."""


class Session(requests.Session):
    """Follows no redirect. With ``allow_redirects=False``, requests would read the whole body of one, however long."""

    def get_redirect_target(self, resp: requests.Response) -> None:
        """None."""


class Allowance:
    """What a run may still read. Unit: bytes."""

    def __init__(self, left: int = RUN_BYTES) -> None:
        self.left = left

    def take(self, size: int) -> None:
        """Errors: ``Unbounded`` where it is used up."""
        self.left -= size
        if self.left < 0:
            raise Unbounded(f"more than {RUN_BYTES >> 20} MiB in all replies")


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole one."""

    status: int
    body: bytes

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def value(self) -> Any:
        """Decoded JSON, or text."""
        text = self.body.decode("utf-8", errors="replace")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text


def fetch(
    method: str,
    url: str,
    *,
    timeout_s: float,
    allowance: Allowance,
    headers: Mapping[str, str],
    session: Any = None,
    **keywords: Any,
) -> Reply:
    """The whole reply, after one redirect at most, within ``timeout_s``. Errors: ``requests.RequestException``."""
    deadline, words = time.monotonic() + timeout_s, keywords | {"headers": {**AS_IT_IS, **headers}}
    asked = in_thread(_fetch, session or Session(), method, url, deadline, allowance, words)
    try:
        return asked.result(timeout=timeout_s + LATE_S)
    except (TimeoutError, urllib3.exceptions.TimeoutError):
        raise requests.ReadTimeout(f"no end within {timeout_s:g} s") from None
    except urllib3.exceptions.HTTPError as error:
        raise requests.ConnectionError(str(error)) from None


def _fetch(session: Any, method: str, url: str, deadline: float, allowance: Allowance, words: dict[str, Any]) -> Reply:
    came, target = _follow(session, method, url, deadline, allowance, words)
    if not target:
        return came
    if urlsplit(target)[:2] != urlsplit(url)[:2]:
        raise Unbounded(f"redirected to another place: {target[:200]}")
    if came.status not in KEEPS_METHOD:
        method, words = "GET", {"headers": words["headers"]}
    came, target = _follow(session, method, target, deadline, allowance, words)
    if target:
        raise Unbounded("redirected more than once")
    return came


def _follow(
    session: Any, method: str, url: str, deadline: float, allowance: Allowance, words: Mapping[str, Any]
) -> tuple[Reply, str]:
    """The reply, and where it leads; it is read only where it leads nowhere."""
    left_s = max(0.001, deadline - time.monotonic())
    with session.request(method, url, timeout=left_s, stream=True, **words) as answer:
        if answer.status_code in MOVED and "location" in answer.headers:
            return Reply(answer.status_code, b""), urljoin(url, answer.headers["location"])
        parts, size = [], 0
        for part in answer.raw.stream(CHUNK, decode_content=False):
            size += len(part)
            allowance.take(len(part))
            if size > REPLY_BYTES:
                raise Unbounded(f"a reply of more than {REPLY_BYTES >> 20} MiB")
            if time.monotonic() > deadline:
                raise requests.ReadTimeout("the reply does not end in time")
            parts.append(part)
        return Reply(answer.status_code, b"".join(parts)), ""


def in_thread(work: Callable[..., Any], *arguments: Any, **keywords: Any) -> "Future[Any]":
    """A daemon's thread, so that one that hangs keeps nobody from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments, **keywords))
        except Exception as error:  # noqa: BLE001
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
