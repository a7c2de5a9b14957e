"""A server under judgement, and what the judge knows of it."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from conformance.judge.servers.bounded import Allowance, Reply, fetch
from conformance.judge.servers.dialect_plugins import kinds
from conformance.judge.servers.dialects import Vllm
from conformance.judge.servers.numbers import TOLERANCE
from conformance.judge.servers.protocol import ServerDialect
from conformance.judge.servers.question import Question

if TYPE_CHECKING:  # loads torch, which calls over HTTP do not need
    from conformance.judge.servers.policy import Policies

FIND_TIMEOUT_S = 20.0
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
KEY_VARIABLE = "ROLLMATCH_API_KEY"
KEY_STATUS = (401, 403)
KEY_REMEDY = f"set {KEY_VARIABLE} to the server's key"


def bearer(key: str | None) -> Mapping[str, str]:
    """Headers with this key; none for an empty one."""
    return {"Authorization": f"Bearer {key}"} if key else NO_HEADERS


class DialectUnclear(Exception):
    """The server's routes are those of a dialect, or the user names one."""


@dataclass(slots=True, kw_only=True)
class Subject:
    """``name`` and ``version`` of the software, where it listens, and what there is to judge it by."""

    name: str
    version: str
    url: str
    dialect: ServerDialect
    transport: str | None = None
    """One of the dialect's, or None where no weights reach the server's workers."""
    policies: "Policies | None" = None
    """None: without the model's directory, prompts are texts and there is nothing to compare with."""
    group_host: str = "127.0.0.1"
    """The address of the group in which the server's workers and the judge transfer weights."""
    allowance: Allowance = field(default_factory=Allowance)
    headers: Mapping[str, str] = field(default_factory=dict)
    """``bearer`` of the server's key; empty: it has none."""
    shares: Any = None
    """``checks.shares.Shares``, once a check has needed them."""
    process: Any = None
    """A ``Launched``, where the judge started the server; may be ended."""

    def prompt(self, text: str, picture: bytes | None = None) -> Question:
        """As the dialects take one: a user's question."""
        if not self.policies:
            return Question(text=text, ids=list(text.encode()), picture=picture)
        options = {} if picture is None else {"has_picture": True}
        return Question(text=text, ids=self.policies.encode(text, **options), picture=picture)

    @property
    def makes_ids(self) -> bool:
        """Whether the ids of a ``prompt`` are those that the server reads."""
        return self.policies is not None or self.dialect.family != "swift"

    @property
    def tolerance(self) -> float:
        """Of numbers that are compared with those of transformers. Unit: nats."""
        return self.policies.tolerance if self.policies else TOLERANCE

    @property
    def _takes_pictures(self) -> bool:
        return self.policies is not None and self.policies.takes_pictures

    def lacks(self, needs: tuple[str, ...]) -> str:
        """What of this there is not, for people; empty where all is there."""
        transport = self.dialect.transports[0]
        missing = {
            "model": None if self.policies else "the model's directory (--model)",
            "ids": None if self.makes_ids else "ids of prompts (--model)",
            "pictures": None if "pictures" in needs and self._takes_pictures else "a model that takes pictures",
            "group": None if self.transport else f"a transport to the server's workers (--transport {transport})",
            "key": None if self.headers else f"the server's key (environment variable {KEY_VARIABLE})",
            "process": None if self.process else "a server that the judge started and may end",
        }
        return ", ".join(text for need in needs if (text := missing[need]))


def find_dialect(url: str, named: str | None = None, headers: Mapping[str, str] = NO_HEADERS) -> ServerDialect:
    """Return the named dialect, or the first whose routes the server lists. Errors: ``DialectUnclear``."""
    routes = set() if named else _routes(url, headers)
    name = named or next((name for name, kind in kinds().items() if kind.signs <= routes), None)
    if name is None and Vllm.generate_path in routes:
        name = Vllm.name  # whose routes for weights are off unless one sets VLLM_SERVER_DEV_MODE
    if name is None:
        raise DialectUnclear(f"{url} lists the routes of no dialect; say --dialect {'|'.join(kinds())}, or FILE.py")
    dialect: ServerDialect = kinds()[name]()
    if isinstance(dialect, Vllm):
        dialect.model = name_of_model(url, headers)
    return dialect


def _routes(url: str, headers: Mapping[str, str]) -> set[str]:
    listed = _get(f"{url}/openapi.json", headers)
    if not listed.is_ok:
        remedy = KEY_REMEDY if listed.status in KEY_STATUS else "URL is the server's root, without /v1 or the like"
        raise DialectUnclear(f"{url}/openapi.json returns {listed.status}: {remedy}; or say --dialect")
    paths = listed.value.get("paths") if isinstance(listed.value, Mapping) else None
    if not isinstance(paths, Mapping):
        raise DialectUnclear(f"{url}/openapi.json lists no paths; say --dialect {'|'.join(kinds())}, or FILE.py")
    return {str(path).rstrip("/") for path in paths}


def meeting_place(url: str, dialect: ServerDialect) -> str:
    """Host of a weight group: the server's; for ``vllm``, where the learner listens, this machine's towards it."""
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname in (None, "localhost") else str(parts.hostname)
    if dialect.family != Vllm.family:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((host, parts.port or 80))
        return str(probe.getsockname()[0])


def name_of_model(url: str, headers: Mapping[str, str]) -> str | None:
    """Return the first model that ``/v1/models`` lists and that is no adapter; None where it lists none."""
    listed = _get(f"{url}/v1/models", headers)
    entries = listed.value.get("data") if listed.is_ok and isinstance(listed.value, Mapping) else None
    named = [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    return next((str(entry["id"]) for entry in named if "id" in entry and not entry.get("parent")), None)


def _get(url: str, headers: Mapping[str, str]) -> Reply:
    return fetch("GET", url, timeout_s=FIND_TIMEOUT_S, allowance=Allowance(), headers=headers)
