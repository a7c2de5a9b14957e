"""Asking one check of one server, within its deadline."""

import time
import traceback
from collections.abc import Collection
from concurrent.futures import TimeoutError as StillRunning
from contextlib import suppress

from conformance.judge.servers.bounded import in_thread
from conformance.judge.servers.check import PASSED, Check, CheckVerdict, judge
from conformance.judge.servers.exchange import Exchange
from conformance.judge.servers.protocol import ReplyUnreadable
from conformance.judge.servers.subject import Subject
from conformance.judge.servers.talk import Stopped, Talk

LEAVE_S, ALIVE_S = 15.0, 8.0
SIGNS_OF_LIFE = ("greedy-repeats", "caches-forget-old-weights", "same-weights-same-responses")
"""The last one leaves the first weights, which checks of adapters expect."""


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
    except (Stopped, ReplyUnreadable) as error:
        talk.exchange.stopped = str(error)
    except Exception as error:  # noqa: BLE001  # anything else is the judge's own fault, and becomes its verdict
        place = traceback.extract_tb(error.__traceback__)[-1]
        talk.exchange.fault = f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"
    else:
        if not (talk.exchange.calls or talk.exchange.untestable):
            talk.exchange.fault = "nothing was called"
    exchange = Exchange(
        calls=list(talk.exchange.calls), notes=dict(talk.exchange.notes),
        stopped=talk.exchange.stopped, fault=talk.exchange.fault, untestable=talk.exchange.untestable,
        inapplicable=talk.exchange.inapplicable,
    )  # a thread that was left behind may still write into the other  # fmt: skip
    with suppress(Exception):
        in_thread(talk.leave).result(timeout=LEAVE_S)
    return exchange


def ask_and_judge(check: Check, subject: Subject) -> tuple[Exchange, CheckVerdict, float]:
    """Also how many seconds it took."""
    began = time.monotonic()
    exchange = ask(check, subject)
    return exchange, judge(check, exchange), round(time.monotonic() - began, 1)


def is_well(subject: Subject, passed: Collection[str]) -> bool:
    """Whether it still generates, and takes updates as before by the checks that it ``passed``."""
    from conformance.judge.servers.checks import BY_ID

    asked = [BY_ID[name] for name in SIGNS_OF_LIFE if name in passed]
    return Talk(subject).generate("alive", ["Say one."], timeout_s=ALIVE_S).is_ok and all(
        ask_and_judge(check, subject)[1].state == PASSED for check in asked
    )
