"""A look at a server's health beside every call that may take long, so that a dead server never becomes a hang."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rollmatch.dialects.calls import BackgroundCall
from rollmatch.dialects.http import REMEDY, CallTimeout, HttpServer, ServerRefused, TransportFailed
from rollmatch.errors import RolloutError

Result = TypeVar("Result")


class ServerDied(RolloutError):
    """A server stays alive until its call returns."""

    code = "server-died"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRules:
    """When a server counts as dead."""

    poll_s: float = 1.0
    """Between two looks."""
    look_timeout_s: float = 2.5
    max_failures: int = 2
    """Looks in a row that may fail; the last of them is one too many."""
    silence_is_death: bool = True
    """False for servers that answer nothing else while they generate: only a refused or broken connection counts."""


def watched(call: Callable[[], Result], server: HttpServer, path: str, rules: WatchRules) -> Result:
    """The call's result or error; ``ServerDied`` as soon as the server's health (at ``path``) is gone.

    The call runs in a thread that is left behind when its server hangs; it cannot keep the process from ending.
    """
    pending, failures = BackgroundCall(call), 0
    while not pending.is_done(within_s=rules.poll_s):
        problem = look(server, path, rules)
        failures = failures + 1 if problem else 0
        if failures >= rules.max_failures:
            raise ServerDied(f"{server.base_url} {problem}", key=server.base_url, remedy=REMEDY)
    return pending.result()


def look(server: HttpServer, path: str, rules: WatchRules) -> str:
    """What is wrong with a server, empty if nothing is."""
    try:
        server.get(path, timeout_s=rules.look_timeout_s)
    except CallTimeout:
        return f"has not answered {path} for {rules.look_timeout_s:g} s" if rules.silence_is_death else ""
    except TransportFailed as error:
        return f"is gone: {error.problem}"
    except ServerRefused as error:
        return f"is not well: {error.problem}"
    return ""
