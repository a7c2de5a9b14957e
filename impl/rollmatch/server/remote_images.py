"""Images by URL, from the hosts that the operator named; nothing is requested from any other."""

import time
from collections.abc import Sequence
from http import HTTPStatus

import requests
from urllib3.util import parse_url

from rollmatch.server.failures import Refusal

SCHEMES = ("http://", "https://", "ftp://")
_HTTP = ("http", "https")
_PAUSE_S = 5.0
_LONGEST_S = 20.0
_CHUNK_BYTES = 65536
_KEY = "custom.extra.rollout_server.allowed_media_domains"


def fetch_image(url: str, domains: Sequence[str], *, max_bytes: int, item: int, key: str) -> bytes:
    """What a URL of one of ``domains`` holds. Errors: ``Refusal``: ``image-url-refused``, ``image-unreadable``."""
    prepared = _prepared(url, domains, item=item, key=key)
    try:
        with requests.Session() as session:
            session.trust_env = False  # a proxy or credentials of this machine are not the caller's
            reply = session.send(prepared, stream=True, allow_redirects=False, timeout=_PAUSE_S)
            if reply.status_code != HTTPStatus.OK:
                raise _unreadable(f"the host answers {reply.status_code}", item=item, key=key)
            return _read(reply, max_bytes, item=item, key=key)
    except (requests.RequestException, OSError) as error:
        raise _unreadable(f"{type(error).__name__}: {error}", item=item, key=key) from error


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


def _read(reply: requests.Response, max_bytes: int, *, item: int, key: str) -> bytes:
    whole, until = bytearray(), time.monotonic() + _LONGEST_S
    for chunk in reply.iter_content(_CHUNK_BYTES):
        whole += chunk
        if len(whole) > max_bytes:
            raise _unreadable(f"has more than {max_bytes} bytes", item=item, key=key)
        if time.monotonic() > until:
            raise _unreadable(f"takes longer than {_LONGEST_S:g} s", item=item, key=key)
    return bytes(whole)


def _unreadable(problem: str, *, item: int, key: str) -> Refusal:
    return Refusal(problem, code="image-unreadable", key=key, remedy="Send the image itself.", item=item)
