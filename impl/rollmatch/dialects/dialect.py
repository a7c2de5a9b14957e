"""Which language a rollout server speaks, by the routes it offers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Literal

from rollmatch.dialects.http import CallTimeout, HttpReply, HttpServer, ReplyMalformed, ServerRefused
from rollmatch.dialects.prompt import Prompt, Reply, SamplingRules
from rollmatch.errors import RolloutError

Post = Callable[[str, object, str], HttpReply]
"""(route without slash at its end, body, content type) -> reply, over a connection of its own."""


class Dialect(ABC):
    """How prompts are put to a server."""

    name: str
    signs: frozenset[str]
    """Routes that only servers of this dialect have together."""
    answers_while_generating: bool
    """Whether the server's health is answered meanwhile."""
    takes_chats: Literal["never", "with images", "always"]
    """Which prompts it takes as chats, to which the server applies its template; all others are sent as ids."""

    def __init__(self, base_url: str) -> None:
        """``base_url`` names the server in errors."""
        self.base_url = base_url

    @abstractmethod
    def exchange(self, post: Post, prompts: Sequence[Prompt], sampling: SamplingRules) -> list[Reply]:
        """One reply per prompt, in order; ``post`` may be called several times."""


def find_routes(server: HttpServer, signs: Iterable[frozenset[str]], *, timeout_s: float) -> dict[str, str]:
    """Routes without their last slash -> as the server writes them.

    They come from /openapi.json; a server without it is probed for each route of ``signs``.

    Errors: ``TransportFailed``, ``CallTimeout``.
    """
    try:
        listed = server.get("/openapi.json", timeout_s=timeout_s).body
    except (ServerRefused, ReplyMalformed):
        listed = None
    if isinstance(listed, dict) and isinstance(listed.get("paths"), dict):
        return {path.rstrip("/"): path for path in listed["paths"]}
    wanted = sorted(frozenset.union(*signs) | {"/health"})
    return {route: path for route in wanted if (path := _probe(server, route, timeout_s))}


def name_dialect(server: HttpServer, routes: Mapping[str, str], signs_of: Mapping[str, frozenset[str]]) -> str:
    """The first dialect of ``signs_of`` whose signs are among the routes. Errors: ``dialect-unknown``."""
    for name, signs in signs_of.items():
        if signs <= routes.keys():
            return name
    raise RolloutError(
        f"{server.base_url} has the routes {sorted(routes)[:12]}, which are those of no dialect",
        code="dialect-unknown",
        key=server.base_url,
        remedy="Name the URL of rollmatch serve, swift rollout, trl vllm-serve or vllm serve with its RL routes.",
    )


def _probe(server: HttpServer, route: str, timeout_s: float) -> str:
    """The route with or without slash, empty if the server has neither; a route that wants POST refuses a GET."""
    for path in (f"{route}/", route):
        try:
            if server.status_of(path, timeout_s=timeout_s) != HTTPStatus.NOT_FOUND:
                return path
        except CallTimeout:
            return path
    return ""
