"""Asking one check of one server, within its deadline."""

import time
from concurrent.futures import TimeoutError as StillRunning
from contextlib import suppress

from conformance.servers.check import Check, Verdict, judge
from conformance.servers.exchange import Exchange
from conformance.servers.subject import Subject
from conformance.servers.talk import Stopped, Talk, in_thread
from rollmatch.errors import RollmatchError

LEAVE_S = 15.0


def ask(check: Check, subject: Subject) -> Exchange:
    """What was sent and what came back; a check that does not end in time is left behind."""
    talk = Talk(subject)
    if lacking := subject.lacks(check.needs):
        talk.exchange.untestable = f"needs {lacking}"
        return talk.exchange
    asking = in_thread(check.ask, talk)
    try:
        asking.result(timeout=check.deadline_s)
    except StillRunning:
        talk.exchange.stopped = f"no end within {check.deadline_s:g} s"
    except (Stopped, RollmatchError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        kind = "" if isinstance(error, Stopped) else f"{type(error).__name__}: "
        talk.exchange.stopped = f"{kind}{error}"
    told = Exchange(
        calls=list(talk.exchange.calls), notes=dict(talk.exchange.notes), stopped=talk.exchange.stopped
    )  # a thread that was left behind may still write into the other
    with suppress(Exception):
        in_thread(talk.leave).result(timeout=LEAVE_S)
    return told


def ask_and_judge(check: Check, subject: Subject) -> tuple[Exchange, Verdict, float]:
    """Also how many seconds it took."""
    began = time.monotonic()
    exchange = ask(check, subject)
    return exchange, judge(check, exchange), round(time.monotonic() - began, 1)


def is_well(subject: Subject) -> bool:
    """Whether it still answers, generates, and takes an update where it could: else it is of no more use."""
    from conformance.servers.checks import BY_ID

    wanted = ("greedy-repeats", "same-weights-same-responses", "old-weights-come-back")
    asked = [BY_ID[name] for name in wanted if not subject.lacks(BY_ID[name].needs)]
    return all(ask_and_judge(check, subject)[1].state == "passed" for check in asked)
