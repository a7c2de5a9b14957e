"""Checks of runs in which one call for rollouts went wrong."""

from conformance.judge.servers.check import SHOULD
from conformance.judge.servers.exchange import Exchange
from conformance.judge.trainers.arrivals import after, of_kind, rounds_of
from conformance.judge.trainers.reading import disturbed, ended, events_of, last_line, repeats, since_restart
from conformance.judge.trainers.registry import WRONG, check
from conformance.judge.trainers.runs import ending_of
from conformance.judge.trainers.server import BUSY, LATE, RESTART, SHORT, UNAVAILABLE


@check(
    "a-late-answer-is-waited-for",
    "A late answer MUST be waited for, and its call is not repeated.",
    LATE,
    requires=("weights-after-every-step",),
    clause=f"{WRONG}#2",
)
def judge_late(exchange: Exchange) -> str:
    if repeats(exchange):
        return "the call was repeated before it was answered"
    code, num_rounds = ending_of(exchange), sum(map(bool, rounds_of(events_of(exchange))[1:]))
    if code != 0:
        return f"{ended(code)}: {last_line(exchange)}"
    return "" if num_rounds >= exchange.notes["steps"] else "the run ended early"


def judge_ignored(exchange: Exchange) -> str:
    if repeats(exchange):
        return ""
    code = ending_of(exchange)
    if code is None:
        return "the run hangs"
    updates = of_kind(list(after(events_of(exchange), disturbed(exchange))), "update")
    if code == 0 or updates:
        return f"the call was not repeated, {len(updates)} updates followed, and {ended(code)}"
    return ""


for _number, _name, _fault, _what in (
    (3, "a-short-answer-is-not-learned-from", SHORT, "an answer with fewer responses than requested"),
    (4, "a-busy-server-is-not-ignored", BUSY, "a 429"),
    (5, "an-unavailable-server-is-not-ignored", UNAVAILABLE, "a 503"),
):
    _text = f"After {_what}, the call MUST be repeated, or the run ends with an error."
    check(_name, _text, _fault, clause=f"{WRONG}#{_number}")(judge_ignored)


def judge_asked_again(exchange: Exchange) -> str:
    if not repeats(exchange):
        return f"the call was not repeated; {ended(ending_of(exchange))}: {last_line(exchange)}"
    return "" if ending_of(exchange) == 0 else f"{ended(ending_of(exchange))}: {last_line(exchange)}"


for _number, _name, _fault, _required in (
    (6, "a-busy-server-is-asked-again", BUSY, "a-busy-server-is-not-ignored"),
    (7, "an-unavailable-server-is-asked-again", UNAVAILABLE, "an-unavailable-server-is-not-ignored"),
):
    _text = f"After a {_fault} with Retry-After, the call SHOULD be repeated, and the run ends well."
    _fields = {"grade": SHOULD, "requires": (_required,), "clause": f"{WRONG}#{_number}"}
    check(_name, _text, _fault, **_fields)(judge_asked_again)


@check(
    "a-restarted-server-gets-weights-first",
    "A restarted server MUST get an update before it is asked for rollouts, or the run ends with an error.",
    RESTART,
    clause=f"{WRONG}#8",
)
def judge_restarted(exchange: Exchange) -> str:
    for event in since_restart(exchange):
        if event["kind"] == "update":
            return ""
        if event["kind"] == "generate":
            return "rollouts were requested of the first weights, which the restarted server holds"
    code = ending_of(exchange)
    return "" if code else f"{ended(code)}, although the server was restarted"


@check(
    "the-run-outlives-a-restart",
    "After a restart of the server, the run SHOULD send weights again, and end well.",
    RESTART,
    grade=SHOULD,
    requires=("a-restarted-server-gets-weights-first",),
    clause=f"{WRONG}#9",
)
def judge_outlives(exchange: Exchange) -> str:
    code = ending_of(exchange)
    return "" if code == 0 else f"{ended(code)}: {last_line(exchange)}"
