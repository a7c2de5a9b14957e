"""The section ``custom.extra.rollout_matching.vllm.server``: where rollout servers are, in one of two forms."""

from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from rollmatch.config.section import Positive, Section

LAST_PORT = 65535


def _check_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that is not closed
        fine = False
    if not fine or parts.query or parts.fragment or value != value.strip():
        raise PydanticCustomError("base_url_invalid", "Input should be a URL such as http://127.0.0.1:8000")
    return value


def _one_or_several(kind: type, many: str) -> Callable[[Any], Any]:
    """A value or a list of values, so that a wrong one is told by the name of its key and not by that of a union."""

    def check(value: Any) -> Any:
        items = value if isinstance(value, list | tuple) else [value]
        if value is None:
            return None
        if any(type(item) is not kind for item in items):
            raise PydanticCustomError("one_or_several", "Input should be {many}", {"many": many})
        return as_some(value)

    return check


def _check_urls(value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    for url in (value,) if isinstance(value, str) else value or ():
        _check_url(url)
    return value


def _check_ports(value: int | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
    for port in (value,) if isinstance(value, int) else value or ():
        if not 0 < port <= LAST_PORT:
            raise PydanticCustomError("out_of_range", "Input should be a port, 1 to 65535")
    return value


def as_some(value: Any) -> Any:
    """A list as a tuple; an empty one is told here, because pydantic does not count items that are wrong themselves."""
    if value == []:
        raise PydanticCustomError("too_short", "List should have at least 1 item")
    return tuple(value) if isinstance(value, list) else value


BaseUrl = Annotated[str, AfterValidator(_check_url)]
"""An http or https URL with a host; routes are appended to it."""
Port = Annotated[int, Field(ge=1, le=LAST_PORT)]
GroupPorts = Annotated[
    int | tuple[int, ...],
    BeforeValidator(_one_or_several(int, "a port or a list of ports"), json_schema_input_type=int | list[int]),
    AfterValidator(_check_ports),
]
"""One port to count on from, or one for each server."""


class ServerEntry(Section):
    """One rollout server."""

    base_url: BaseUrl
    """URL prefix of all its routes, such as http://127.0.0.1:8000."""
    group_port: Port
    """Port of the weight-sync group (torch.distributed rendezvous). Unit: port."""


class ServerConfig(Section):
    """Addresses of the rollout servers: either servers, or base_url with group_port."""

    servers: (
        Annotated[
            tuple[ServerEntry, ...],
            BeforeValidator(as_some, json_schema_input_type=Annotated[list[ServerEntry], Field(min_length=1)]),
        ]
        | None
    ) = None
    """List of servers, each a mapping of base_url and group_port."""
    base_url: Annotated[
        str | tuple[str, ...] | None,
        BeforeValidator(_one_or_several(str, "a URL or a list of URLs"), json_schema_input_type=str | list[str] | None),
        AfterValidator(_check_urls),
    ] = None
    """URL prefix of the server, or a list of URLs."""
    group_port: GroupPorts | None = None
    """Port of the weight-sync group: first port (the next servers count up) or one per server. Unit: port."""
    timeout_s: Positive = 240.0
    """Time to wait for the servers to become healthy, and for the weight-sync group to open. Unit: seconds."""
    infer_timeout_s: float | None = None
    """Timeout of one generation call; null or a value up to 0 means no timeout, and a dead server is still detected
    through /health/. Unit: seconds."""
