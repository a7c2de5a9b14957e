"""Checks of rollout servers: ``ask`` calls the server, ``judge`` needs nothing but the recorded exchange.

An ``ask`` ends by ``Stopped`` where the server stops it, and reads replies by its dialect's ``read``. Any
other exception that leaves it is the judge's own fault, and is reported as such.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conformance.judge.servers.exchange import Exchange

MUST, SHOULD = "MUST", "SHOULD"
PASSED, MISSED, UNTESTABLE, FAULTY = "passed", "missed", "not-testable", "harness-error"
INAPPLICABLE = "not-applicable"
"""The dialect names the check, with a reason; or the server does not offer what it asks for."""
QUEUED = ("swift", "trl")
SIZE = "world-size-is-returned"
ALL = ("native", "swift", "trl", "vllm")
Judge = Callable[[Exchange], str]
"""Returns why the server misses the check; empty where it passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check; ``sentence`` is that of the specification, what a server does that passes."""

    check_id: str
    sentence: str
    clause: str = ""
    """Its id in the specification, ``capability/requirement#n``."""
    ask: Callable[[Any], Any]
    """Of a server: takes a ``Talk``. Of a trainer: takes its ``TrainerRuns`` and returns the exchange."""
    judge: Judge
    grade: str = MUST
    dialects: tuple[str, ...] = ALL
    deadline_s: float = 30.0
    is_dangerous: bool = False
    """May leave the server unable to serve: runs last, on a fresh one where there can be one."""
    is_timed: bool = False
    """Judges how fast a reply comes: runs after the other checks that are not dangerous."""
    needs: tuple[str, ...] = ()
    """Of ``model`` (its directory), ``ids`` (of prompts: sent as such, or by the model), ``pictures`` (a model that
    takes them), ``group`` (a transport), ``key`` (the server's) and ``process`` (one that may be ended).
    """
    since: str = ""
    """Day on which it was added; recordings of an earlier day lack it."""
    requires: tuple[str, ...] = ()
    """Checks without which this one shows nothing: where one of them is missed, this one is not asked."""


REGISTERED: list[Check] = []


def check(check_id: str, sentence: str, **fields: Any) -> Callable[[Judge], Judge]:
    """Register the decorated function as the judge of a check; ``fields`` as in ``Check``."""

    def register(judge: Judge) -> Judge:
        if "group" in fields.get("needs", ()) and check_id != SIZE:
            fields["requires"] = (SIZE, *fields.get("requires", ()))
        REGISTERED.append(Check(check_id=check_id, sentence=sentence, judge=judge, **fields))
        return judge

    return register


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckVerdict:
    """What an exchange shows."""

    state: str
    reason: str = ""


def judge(check: Check, exchange: Exchange) -> CheckVerdict:
    """Judge the exchange alone, so that a recorded one is judged as a live one is."""
    if exchange.untestable:
        return CheckVerdict(state=UNTESTABLE, reason=exchange.untestable)
    if exchange.inapplicable:
        return CheckVerdict(state=INAPPLICABLE, reason=exchange.inapplicable)
    if exchange.fault:
        return CheckVerdict(state=FAULTY, reason=exchange.fault)
    if exchange.stopped:
        return CheckVerdict(state=MISSED, reason=exchange.stopped)
    try:
        reason = check.judge(exchange)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        reason = f"a reply has another form: {type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001  # the judge's own fault, and its verdict
        return CheckVerdict(state=FAULTY, reason=f"{type(error).__name__}: {error}")
    return CheckVerdict(state=MISSED if reason else PASSED, reason=reason)
