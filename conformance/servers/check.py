"""A check: how a server is asked, and how the answers are judged. The second needs nothing but the exchange."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conformance.servers.exchange import Exchange

if TYPE_CHECKING:
    from conformance.servers.talk import Talk

MUST, SHOULD = "MUST", "SHOULD"
PASSED, MISSED, UNTESTABLE = "passed", "missed", "not-testable"
QUEUED = ("swift", "trl")
ALL = ("native", "swift", "trl", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question to a server."""

    check_id: str
    sentence: str
    """What a server does that passes."""
    ask: Callable[["Talk"], None]
    judge: Callable[[Exchange], str]
    """Why the server misses it; empty where it passes."""
    grade: str = MUST
    dialects: tuple[str, ...] = ALL
    deadline_s: float = 30.0
    is_dangerous: bool = False
    """May leave the server unable to serve: runs last, on a fresh one where there can be one."""
    is_timed: bool = False
    """What it judges is how fast an answer comes: nothing else runs meanwhile."""
    needs: tuple[str, ...] = ()
    """Of ``model`` (its directory), ``group`` (a transport) and ``process`` (one that may be ended)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckVerdict:
    """What an exchange shows."""

    state: str
    reason: str = ""


def judge(check: Check, exchange: Exchange) -> CheckVerdict:
    """From the exchange alone, so that a recorded one is judged as a live one is."""
    if exchange.untestable:
        return CheckVerdict(state=UNTESTABLE, reason=exchange.untestable)
    if exchange.stopped:
        return CheckVerdict(state=MISSED, reason=exchange.stopped)
    try:
        reason = check.judge(exchange)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        reason = f"an answer has another form: {type(error).__name__}: {error}"
    return CheckVerdict(state=MISSED if reason else PASSED, reason=reason)
