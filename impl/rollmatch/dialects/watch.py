"""A look at a server's health beside every call that may take long, so that a dead server never becomes a hang."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from rollmatch.dialects.calls import BackgroundCall
from rollmatch.dialects.http import REMEDY, CallTimeout, HttpServer, ServerRefused, TransportFailed
from rollmatch.dialects.reply import health_of
from rollmatch.errors import RolloutError

Result = TypeVar("Result")
_SHORTEST_LOOK_S = 0.25


class ServerDied(RolloutError):
    """A server died before its call returned."""

    code = "server-died"


class CallStalled(RolloutError):
    """No response of a call grew while the call waited for it."""

    code = "call-stalled"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRules:
    """When a server counts as dead. One that refuses connections or says that it is ill is not just slow."""

    poll_s: float = 1.0
    """Between two looks."""
    look_timeout_s: float = 2.5
    max_failures: int = 2
    """Looks in a row that find the server gone or ill."""
    silence_s: float | None = 8.0
    """Time without an answer; None for servers that answer nothing else while they generate."""
    stall_s: float | None = None
    """Time without progress of a call whose server counts it, and is well otherwise; None: no limit."""


class Look(NamedTuple):
    """What a look at a server's health found."""

    problem: str = ""
    """Empty for a server that is well."""
    is_slow: bool = False
    """The server accepted the connection and did not answer in time."""
    progress: object = None
    """Changes while the server generates; None where it is not counted."""
    idle_s: Mapping[str, float] = MappingProxyType({})
    """Call id -> time for which one of the call's responses has not grown; the calls that the server knows."""


class _Stall:
    """Raises ``CallStalled`` when a call has made no progress for too long, or its server where it counts no calls."""

    def __init__(self, base_url: str, stall_s: float | None, *, call_id: str = "") -> None:
        self.base_url, self.stall_s, self.call_id = base_url, stall_s, call_id
        self._progress: object = None
        self._changed_at = time.monotonic()

    def check(self, found: Look) -> None:
        """Note what a look found."""
        now = time.monotonic()
        if found.progress is None or found.progress != self._progress:
            self._progress, self._changed_at = found.progress, now
        idle_s = max(now - self._changed_at, found.idle_s.get(self.call_id, 0.0))
        if self.stall_s is not None and idle_s >= self.stall_s:
            problem = f"{self.base_url} is well, but has not generated a token of a response for {idle_s:.0f} s"
            remedy = "If it was only slow, raise vllm.server.stall_timeout_s."
            raise CallStalled(problem, key=self.base_url, remedy=remedy)


def watched(
    call: Callable[[], Result], server: HttpServer, path: str, rules: WatchRules, *, call_id: str = ""
) -> Result:
    """The call's result or error; ``ServerDied`` as soon as the server's health (at ``path``) is gone.

    ``CallStalled`` when the server is well, but a response of the call does not grow for ``stall_s``: one of
    ``call_id`` where the server counts by call, else any.

    The call runs in a thread that is left behind when its server hangs; it cannot keep the process from ending.
    """
    pending, num_failures, answered_at = BackgroundCall(call), 0, time.monotonic()
    stall = _Stall(server.base_url, rules.stall_s, call_id=call_id)
    while not pending.is_done(within_s=rules.poll_s):
        silent_s = time.monotonic() - answered_at
        found = look(server, path, rules, silent_s=silent_s)
        silent_s = time.monotonic() - answered_at
        if not found.problem:
            num_failures, answered_at = 0, time.monotonic()
            stall.check(found)
        elif not found.is_slow:
            num_failures += 1
        if num_failures >= rules.max_failures:
            raise ServerDied(f"{server.base_url} {found.problem}", key=server.base_url, remedy=REMEDY)
        if found.is_slow and rules.silence_s is not None and silent_s >= rules.silence_s:
            problem = f"{server.base_url} has not answered {path} for {silent_s:.0f} s"
            remedy = f"{REMEDY} If it was only slow, raise vllm.server.health_timeout_s."
            raise ServerDied(problem, key=server.base_url, remedy=remedy)
    return pending.result()


def look(server: HttpServer, path: str, rules: WatchRules, *, silent_s: float = 0.0) -> Look:
    """Request a server's health once; after ``silent_s`` without an answer, no longer than the rules still allow.

    Errors: ``ReplyMalformed``.
    """
    timeout_s = rules.look_timeout_s
    if rules.silence_s is not None:
        timeout_s = max(_SHORTEST_LOOK_S, min(timeout_s, rules.silence_s - silent_s))
    try:
        body = server.get(path, timeout_s=timeout_s).body
    except CallTimeout:
        return Look(f"has not answered {path} for {timeout_s:g} s", is_slow=True)
    except TransportFailed as error:
        return Look(f"is gone: {error.problem}")
    except ServerRefused as error:
        return Look(f"is not well: {error.problem}")
    health = health_of(body, base_url=server.base_url)
    return Look(progress=health.get("progress"), idle_s=health.get("calls", {}))
