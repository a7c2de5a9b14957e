"""Who may call the server: the bearer key, and without one the names and pages that reach a loopback address.

A web page can make its reader's browser call 127.0.0.1. The browser then names the page in ``Origin``, or, if the
page's own host name was pointed at 127.0.0.1, that host name in ``Host``; it sends JSON only to servers that agree.
"""

import hmac
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from rollmatch.config.connection import is_loopback
from rollmatch.errors import LaunchError
from rollmatch.server.failures import Refusal
from rollmatch.server.settings import KEY_VARIABLE, ServerSettings

CONTENT_TYPES = ("application/json", "application/msgpack", "application/x-msgpack", "application/vnd.msgpack")


class OpenWithoutKey(LaunchError):
    """A server that other machines can reach has a bearer key."""

    code = "open-without-key"


def check_exposure(settings: ServerSettings) -> None:
    """Raise ``OpenWithoutKey`` where a server without a key would listen on more than loopback."""
    if is_loopback(settings.host) or settings.api_key or settings.allow_no_key:
        return
    remedy = (
        f"Set the environment variable {KEY_VARIABLE} for server and learner, or allow it: "
        "custom.extra.rollout_server.allow_no_key: true, or --allow-no-key of vllm-serve."
    )
    raise OpenWithoutKey(f"everybody who reaches {settings.host} could use it", key="host", remedy=remedy)


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
    """Host and Origin of a call to a server without a key. Errors: ``Refusal`` with ``host-`` or ``origin-refused``."""
    names = {name.lower() for name in allowed}
    host, origin = headers.get("host", ""), headers.get("origin")
    remedy = "Call it by a loopback name, name the host in custom.extra.rollout_server.allowed_hosts, or set a key."
    if not _is_known(f"//{host}", names):
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


def _is_known(url: str, names: set[str]) -> bool:
    try:
        host = (urlsplit(url).hostname or "").lower()
    except ValueError:
        return False
    return is_loopback(host) or host in names
