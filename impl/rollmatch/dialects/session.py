"""One rollout server as the learner uses it: connect, generate, watch, control.

A generate call may be repeated, because it changes nothing: a broken connection is tried once more over a fresh one,
then the call is halved until the request that breaks it stands alone. A control call is sent once.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, TypedDict

import msgspec

from rollmatch.dialects.dialect import Dialect, find_routes, name_dialect
from rollmatch.dialects.http import (
    JSON,
    REMEDY,
    REPLY_S,
    CallTimeout,
    HttpReply,
    HttpServer,
    ServerRefused,
    TransportFailed,
)
from rollmatch.dialects.native.client import NativeDialect
from rollmatch.dialects.prompt import CallLog, Prompt, Reply, SamplingRules
from rollmatch.dialects.reply import MODELS, Health, Read, ServedModels, health_of, read_as
from rollmatch.dialects.swift.client import SwiftDialect
from rollmatch.dialects.trl.client import TrlDialect
from rollmatch.dialects.vllm.client import VllmDialect
from rollmatch.dialects.watch import ServerDied, WatchRules, look, watched
from rollmatch.errors import RolloutError
from rollmatch.weights.group_address import MAX_WORLD_SIZE

DIALECTS: Mapping[str, type[Dialect]] = {
    kind.name: kind for kind in (NativeDialect, SwiftDialect, TrlDialect, VllmDialect)
}
"""In this order: our own server speaks several, and the first one whose signs it shows is used."""
SIGNS = {name: kind.signs for name, kind in DIALECTS.items()}
GO_WITHOUT = (
    "Start the rollout server and check base_url, or train without one: vllm.mode colocate, or rollout_backend hf."
)
CONTROL_TIMEOUT_S, HEALTH_TIMEOUT_S = 60.0, 10.0
CACHES = ("/reset_prefix_cache", "/reset_encoder_cache", "/reset_mm_cache")
"""What forgets what older weights have computed."""
TOO_LARGE = ("call-too-large", "body-too-large")
"""Codes of our servers for calls whose halves they may take."""
_POLL_S = 0.25


class _Workers(TypedDict):
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)]


class ServerUnreachable(RolloutError):
    """A server named in the configuration does not answer."""

    code = "server-unreachable"


class InferTimeout(RolloutError):
    """A generate call was not answered within ``infer_timeout_s``."""

    code = "infer-timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """How servers are reached. Made by ``cli`` from the configuration."""

    timeout_s: float
    """For health and for the group that transfers weights."""
    infer_timeout_s: float | None = None
    """None: no limit, but a watch."""
    api_key: str | None = None
    watch: WatchRules = field(default_factory=WatchRules)


class RolloutServer:
    """One rollout server, by the prefix of its routes."""

    def __init__(self, base_url: str, settings: ClientSettings) -> None:
        reply_s = settings.watch.stall_s or REPLY_S
        self.http = HttpServer(base_url, api_key=settings.api_key, reply_s=reply_s)
        self.base_url = self.http.base_url
        self.settings = settings
        self.routes: dict[str, str] = {}
        self.dialect: Dialect = NativeDialect(self.base_url)
        self.watch = settings.watch

    def connect(self) -> None:
        """Wait for health, then find out the dialect. Errors: ``ServerUnreachable``, ``dialect-unknown``."""
        self.wait_until_healthy(self.settings.timeout_s)
        self.routes = find_routes(self.http, SIGNS.values(), timeout_s=CONTROL_TIMEOUT_S)
        self.dialect = DIALECTS[name_dialect(self.http, self.routes, SIGNS)](self.base_url)
        if not self.dialect.answers_while_generating:
            self.watch = replace(self.watch, silence_s=None)

    def wait_until_healthy(self, timeout_s: float) -> Health:
        """The server's health, as soon as it is well.

        Errors: ``ServerUnreachable``, ``ServerRefused`` (dead, key), ``ReplyMalformed``.
        """
        deadline, problem = time.monotonic() + timeout_s, "no answer"
        while (left := deadline - time.monotonic()) > 0:
            try:
                return self.health(timeout_s=min(left, 10.0))
            except ServerRefused as error:
                if error.code in ("worker-dead", "bearer-key-missing", "bearer-key-wrong"):
                    raise
                problem = error.problem
            except (TransportFailed, CallTimeout) as error:
                problem = error.problem
            time.sleep(max(0.0, min(_POLL_S, deadline - time.monotonic())))
        raise ServerUnreachable(
            f"{self.base_url} was not well within {timeout_s:g} s: {problem}", key=self.base_url, remedy=GO_WITHOUT
        )

    def health(self, *, timeout_s: float) -> Health:
        """Of the server; empty in most dialects."""
        body = self.http.get(self.path_of("/health"), timeout_s=timeout_s).body
        return health_of(body, base_url=self.base_url)

    def world_size(self) -> int:
        """Number of the server's workers. Errors: those of ``get``."""
        return self.get("/get_world_size", _Workers)["world_size"]

    def instance(self) -> str:
        """What the server calls itself since its start, empty if nothing; a stock vllm serve: its weights."""
        health = self.health(timeout_s=HEALTH_TIMEOUT_S)
        if "instance" in health or "/weight_info" not in self.routes:
            return health.get("instance", "")
        about = self.get("/weight_info", dict[str, object], timeout_s=HEALTH_TIMEOUT_S)
        return str(about.get("weight_version", ""))

    def max_model_len(self) -> int | None:
        """Most tokens of prompt and response together; None where the server does not say. Errors: those of ``get``."""
        if MODELS not in self.routes:
            return None
        return self.get(MODELS, ServedModels, timeout_s=HEALTH_TIMEOUT_S)["data"][0].get("max_model_len")

    def path_of(self, route: str, query: str = "") -> str:
        """A route as this server writes it: with a slash at its end unless its list of routes has none."""
        path = self.routes.get(route, f"{route}/")
        return f"{path}?{query}" if query else path

    def get(self, route: str, kind: type[Read], *, timeout_s: float = CONTROL_TIMEOUT_S, query: str = "") -> Read:
        """The body of a reply, as ``kind``; sent once. Errors: those of ``HttpServer.get``."""
        path = self.path_of(route, query)
        return read_as(kind, self.http.get(path, timeout_s=timeout_s).body, route=route, base_url=self.base_url)

    def control(
        self,
        route: str,
        body: object = None,
        *,
        timeout_s: float = CONTROL_TIMEOUT_S,
        content_type: str = JSON,
        query: str = "",
    ) -> object:
        """Send once. A control call that failed may have arrived, so it is never repeated automatically."""
        path = self.path_of(route, query)
        return self.http.post(path, body, timeout_s=timeout_s, content_type=content_type).body

    def empty_caches(self) -> None:
        """Call those routes of ``CACHES`` that this server has."""
        for route in CACHES:
            if route in self.routes:
                self.control(route)

    def infer(
        self, prompts: Sequence[Prompt], sampling: SamplingRules, *, start: int = 0, log: CallLog | None = None
    ) -> list[Reply]:
        """One reply per prompt, in order; ``start`` is the first one's index in the whole list, for messages.

        Errors: ``ServerUnreachable``, ``ServerDied``, ``InferTimeout``, ``ServerRefused``, ``ReplyMalformed``,
        ``reply-count-mismatch``.
        """
        span, log = spelled(start, start + len(prompts)), log or CallLog()
        log.note(prompts, start=start)
        try:
            return self._ask_twice(prompts, sampling, log)
        except TransportFailed as error:
            found = look(self.http, self.path_of("/health"), self.watch)
            if found.problem and not found.is_slow:
                text = f"{self.base_url} {found.problem}, with {span}"
                raise ServerDied(text, key=self.base_url, remedy=REMEDY) from error
            if len(prompts) == 1:
                text = f"{self.base_url} broke the connection twice for {span}: {error.problem}"
                raise ServerUnreachable(text, key=self.base_url, remedy=GO_WITHOUT) from error
        except CallTimeout as error:
            limit = self.settings.infer_timeout_s or 0.0
            text = f"{self.base_url} did not answer {span} within {limit:g} s"
            remedy = "Raise vllm.server.infer_timeout_s, or request less at a time."
            raise InferTimeout(text, key=self.base_url, remedy=remedy) from error
        except RolloutError as error:
            if error.code not in TOO_LARGE or len(prompts) == 1:
                raise _with_span(error, self.base_url, span, start) from error
        middle = (len(prompts) + 1) // 2
        log.num_splits += 1
        first = self.infer(prompts[:middle], sampling, start=start, log=log)
        return first + self.infer(prompts[middle:], sampling, start=start + middle, log=log)

    def _ask_twice(self, prompts: Sequence[Prompt], sampling: SamplingRules, log: CallLog) -> list[Reply]:
        try:
            return self._ask(prompts, sampling)
        except TransportFailed:
            log.num_retries += 1
            return self._ask(prompts, sampling)

    def _ask(self, prompts: Sequence[Prompt], sampling: SamplingRules) -> list[Reply]:
        limit, call_id = self.settings.infer_timeout_s, uuid.uuid4().hex
        http = self.http.naming(call_id)

        num_tokens = sum(max(prompt.max_tokens or 0, sampling.max_tokens) for prompt in prompts)

        def post(route: str, body: object, content_type: str) -> HttpReply:
            path = self.path_of(route)
            return http.post(path, body, timeout_s=limit or None, content_type=content_type, num_tokens=num_tokens)

        def call() -> list[Reply]:
            return self.dialect.exchange(post, prompts, sampling)

        return call() if limit else watched(call, self.http, self.path_of("/health"), self.watch, call_id=call_id)


def spelled(start: int, stop: int) -> str:
    """A range of requests in words.

    >>> spelled(2, 3), spelled(2, 4), spelled(2, 9)
    ('request 2', 'requests 2 and 3', 'requests 2 to 8')
    """
    if stop - start == 1:
        return f"request {start}"
    return f"requests {start} and {stop - 1}" if stop - start == 2 else f"requests {start} to {stop - 1}"


def _with_span(error: RolloutError, base_url: str, span: str, start: int) -> RolloutError:
    """The same error, with the server and the requests it concerns."""
    named = type(error)(f"{error.problem} ({span})", key=base_url, remedy=error.remedy)
    named.code = error.code
    if isinstance(error, ServerRefused) and isinstance(named, ServerRefused):
        named.status = error.status
        named.item = None if error.item is None else start + error.item
    return named
