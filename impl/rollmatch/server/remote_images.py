"""Images by URL, from the hosts that the operator named; nothing is requested from any other."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import certifi
import requests
import urllib3
from urllib3.util import parse_url

from rollmatch.errors import kind_and_text
from rollmatch.server.failures import Refusal
from rollmatch.server.workers import DIED, TOO_SLOW, Workers

SCHEMES = ("http://", "https://", "ftp://")
_HTTP = ("http", "https")
_PAUSE_S = 5.0
LONGEST_S = 20.0
"""Of one download, whichever part of it is slow: its process is ended then."""
NUM_DOWNLOADS = 4
"""At the same time, each in a process of its own."""
_CHUNK_BYTES = 65536
_DOWNLOADS = Workers(NUM_DOWNLOADS)
_KEY = "custom.extra.rollout_server.allowed_media_domains"


def fetch_image(url: str, domains: Sequence[str], *, max_bytes: int, item: int, key: str) -> bytes:
    """What a URL of one of ``domains`` holds. Errors: ``Refusal``: ``image-url-refused``, ``image-unreadable``."""
    sent = _prepared(url, domains, item=item, key=key).url
    future = _DOWNLOADS.schedule(_download, sent, max_bytes, timeout_s=LONGEST_S)
    try:
        found = future.result()
    except TOO_SLOW as error:
        raise _unreadable(f"takes longer than {LONGEST_S:g} s", item=item, key=key) from error
    except DIED as error:
        raise _unreadable("the process that fetches it ended", item=item, key=key) from error
    if isinstance(found, str):
        raise _unreadable(found, item=item, key=key)
    return bytes(found)


def _download(url: str, max_bytes: int) -> bytes | str:
    """In the process: what the URL holds, or what is wrong with it."""
    words: dict[str, Any] = {"preload_content": False, "redirect": False, "retries": False, "timeout": _PAUSE_S}
    try:
        # Not by requests: it reads the body of a redirect to its end, and takes proxies and keys of this machine.
        with urllib3.PoolManager(ca_certs=certifi.where()) as pool, pool.request("GET", url, **words) as reply:
            if reply.status != HTTPStatus.OK:
                return f"the host answers {reply.status}"
            whole = bytearray()
            for chunk in reply.stream(_CHUNK_BYTES):
                whole += chunk
                if len(whole) > max_bytes:
                    return f"has more than {max_bytes} bytes"
            return bytes(whole)
    except (urllib3.exceptions.HTTPError, OSError) as error:
        return kind_and_text(error)


def _prepared(url: str, domains: Sequence[str], *, item: int, key: str) -> requests.PreparedRequest:
    """The host is compared as it is sent: parsers differ in how they read odd URLs."""
    problem, remedy = "is a URL of another machine", f"Send a data URL or base64 text, or name its host in {_KEY}."
    try:
        prepared = requests.Request("GET", url).prepare()
        sent = parse_url(prepared.url or "")
    except (requests.RequestException, ValueError) as error:
        raise Refusal(problem, code="image-url-refused", key=key, remedy=remedy, item=item) from error
    if sent.scheme not in _HTTP or sent.host not in domains or sent.auth:
        raise Refusal(problem, code="image-url-refused", key=key, remedy=remedy, item=item)
    return prepared


def _unreadable(problem: str, *, item: int, key: str) -> Refusal:
    return Refusal(problem, code="image-unreadable", key=key, remedy="Send the image itself.", item=item)
