"""Which language a rollout server speaks, by the routes it offers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rollmatch.dialects.http import Answer, CallTimeout, HttpServer, ReplyMalformed, ServerRefused
from rollmatch.dialects.prompt import Prompt, Reply, SamplingRules
from rollmatch.errors import RolloutError

Post = Callable[[str, Any, str], Answer]
"""(route without slash at its end, body, content type) -> reply, over a connection of its own."""

SIGNS: Mapping[str, frozenset[str]] = {
    "native": frozenset({"/native/infer", "/native/sync", "/native/communicator"}),
    "swift": frozenset({"/infer", "/init_communicator", "/update_flattened_params"}),
    "trl": frozenset({"/generate", "/init_communicator", "/update_named_param"}),
    "vllm": frozenset({"/v1/chat/completions", "/init_weight_transfer_engine", "/update_weights"}),
}
"""Dialect -> routes that only it has together; the first that fits is spoken."""
NOT_FOUND = 404


class DialectUnknown(RolloutError):
    """A server's routes are those of a dialect that the client speaks."""

    code = "dialect-unknown"


class Dialect(Protocol):
    """How prompts are put to a server."""

    name: str
    answers_while_generating: bool
    """Whether the server's health is answered meanwhile."""

    def exchange(self, post: Post, prompts: Sequence[Prompt], sampling: SamplingRules) -> list[Reply]:
        """One reply per prompt, in order; ``post`` may be called several times."""


def find_routes(server: HttpServer, *, timeout_s: float) -> dict[str, str]:
    """Routes without slash at their end -> as the server has them. A server without a list of them is asked for each.

    Errors: ``TransportFailed``, ``CallTimeout``.
    """
    try:
        listed = server.get("/openapi.json", timeout_s=timeout_s).body
    except (ServerRefused, ReplyMalformed):
        listed = None
    if isinstance(listed, dict) and isinstance(listed.get("paths"), dict):
        return {path.rstrip("/"): path for path in listed["paths"]}
    wanted = sorted(frozenset.union(*SIGNS.values()) | {"/health"})
    return {route: path for route in wanted if (path := _probe(server, route, timeout_s))}


def name_dialect(server: HttpServer, routes: Mapping[str, str]) -> str:
    """Errors: ``DialectUnknown``."""
    for name, signs in SIGNS.items():
        if signs <= routes.keys():
            return name
    raise DialectUnknown(
        f"{server.base_url} has the routes {sorted(routes)[:12]}, which are those of no dialect",
        key=server.base_url,
        remedy="Name the URL of rollmatch serve, swift rollout, trl vllm-serve or vllm serve with its RL routes.",
    )


def _probe(server: HttpServer, route: str, timeout_s: float) -> str:
    """The route with or without slash, empty if the server has neither; a route that wants POST refuses a GET."""
    for path in (f"{route}/", route):
        try:
            if server.status_of(path, timeout_s=timeout_s) != NOT_FOUND:
                return path
        except CallTimeout:
            return path
    return ""
