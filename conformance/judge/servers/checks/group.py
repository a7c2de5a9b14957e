"""Communicators between a learner and the server's workers."""

import socket
import time
from typing import Any

from conformance.judge.ports import free_port
from conformance.judge.servers.check import QUEUED, SHOULD, check
from conformance.judge.servers.checks.generation import QUESTIONS
from conformance.judge.servers.checks.weights import ask_next, expect, was, write
from conformance.judge.servers.exchange import Exchange
from conformance.judge.servers.peers import BESIDE_EMBEDDINGS, halves, make_peer, open_peer, sync
from conformance.judge.servers.talk import Stopped, Talk

NEEDS = ("model", "group")
RECOVERY_S = 75.0


def ask_again(talk: Talk) -> None:
    for _ in range(2):
        open_peer(talk).close()
    sync(talk, 0)
    talk.generate("after", QUESTIONS[:1])


@check(
    "a-group-opens-again",
    "A communicator MUST be closable, and openable again at another port, and usable for an update.",
    clause="servers/one-learner-at-a-time-opens-the-weight-group#1",
    ask=ask_again,
    needs=NEEDS,
    requires=("world-size-is-returned",),
    deadline_s=90,
)
def judge_after(exchange: Exchange) -> str:
    return exchange.unmet(ok=("after",))


def ask_second(talk: Talk) -> None:
    peer = open_peer(talk)
    make_peer(talk).init("second", port=free_port())
    peer.send(talk.subject.policies.weights(0))
    peer.finish()
    talk.generate("after", QUESTIONS[:1])


@check(
    "second-communicator-is-refused",
    "A second communicator MUST be rejected while one is open, and the first one still works.",
    clause="servers/one-learner-at-a-time-opens-the-weight-group#2",
    ask=ask_second,
    needs=NEEDS,
    is_dangerous=True,
    deadline_s=240,
)
def judge_second(exchange: Exchange) -> str:
    return exchange.unmet(refused=("second",), ok=("after",))


def ask_nobody(talk: Talk) -> None:
    """Generates while the server waits for a learner that never comes."""
    peer = make_peer(talk)
    peer.joining_limit_s = 5.0  # a call that continues would disturb the next check
    waiting = talk.beside(peer.init, "init")
    time.sleep(1.0)
    talk.generate("meanwhile", QUESTIONS[:1], timeout_s=40)
    talk.note("waited", not waiting.done())
    talk.get("health", talk.subject.dialect.health_path, timeout_s=5)
    waiting.result()


@check(
    "serves-while-nobody-joins",
    "While a communicator waits for a learner that never joins, calls SHOULD be served.",
    clause="servers/one-learner-at-a-time-opens-the-weight-group#3",
    grade=SHOULD,
    ask=ask_nobody,
    needs=("group",),
    is_dangerous=True,
    deadline_s=70,
)
def judge_nobody(exchange: Exchange) -> str:
    return exchange.unmet(ok=("meanwhile", "health"))


def ask_busy_port(talk: Talk) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        talk.note("port", port)
        make_peer(talk).init("init", port=port)
        talk.generate("after", QUESTIONS[:1])


@check(
    "taken-group-port-is-named",
    "A group port in use SHOULD be rejected with its number, and the server continues.",
    clause="servers/one-learner-at-a-time-opens-the-weight-group#4",
    grade=SHOULD,
    dialects=("native", *QUEUED),
    ask=ask_busy_port,
    needs=("group",),
    is_dangerous=True,
    deadline_s=60,
)
def judge_busy_port(exchange: Exchange) -> str:
    call = exchange.one("init")
    if call.is_ok or str(exchange.notes["port"]) not in str(call.reply):
        return f"the reply does not name the port: {call.summary()}"
    return exchange.unmet(ok=("after",))


def ask_wrong_size(talk: Talk) -> None:
    peer = make_peer(talk)
    peer.init("init", world_size=7)
    talk.generate("after", QUESTIONS[:1])


@check(
    "wrong-world-size-is-refused",
    "A learner that expects another group size SHOULD be rejected.",
    clause="servers/one-learner-at-a-time-opens-the-weight-group#5",
    grade=SHOULD,
    dialects=("native", *QUEUED),
    ask=ask_wrong_size,
    needs=("group",),
    is_dangerous=True,
    deadline_s=60,
)
def judge_wrong_size(exchange: Exchange) -> str:
    return exchange.unmet(refused=("init",), ok=("after",))


def ask_dying(talk: Talk) -> None:
    """A learner that announces an update and is gone; then another one comes."""
    peer = open_peer(talk)
    weights = dict(list(talk.subject.policies.weights(0).items())[:1])
    if talk.subject.dialect.family == "vllm":
        peer.begin()
    call: Any = peer.announce(weights, "announced")
    time.sleep(0.5)
    peer.group = None
    if talk.subject.dialect.family != "vllm":  # there, generation stays paused until a learner resumes it
        talk.generate("recovered", QUESTIONS[:1], timeout_s=RECOVERY_S)
    else:
        call.result(timeout=RECOVERY_S)
    if hasattr(call, "result") and not call.done():
        raise Stopped("the call of the announced update does not return")
    try:
        peer.release()
        sync(talk, 0)
    except Stopped as stop:
        talk.note("second_learner", str(stop))
    talk.generate("after", QUESTIONS[:1])


@check(
    "recovers-from-a-dead-learner",
    "After a learner died during an update, calls SHOULD be served within 75 s (vllm: after /resume), "
    "and the next one syncs.",
    clause="servers/one-learner-at-a-time-opens-the-weight-group#6",
    grade=SHOULD,
    dialects=("swift", "trl", "vllm"),
    ask=ask_dying,
    needs=NEEDS,
    is_dangerous=True,
    deadline_s=240,
)
def judge_dying(exchange: Exchange) -> str:
    if unserved := [call for call in exchange.all("recovered") if not call.is_ok]:
        return f"{RECOVERY_S:g} s later calls are not served: {unserved[0].summary()}"
    if exchange.notes.get("second_learner"):
        return f"the next learner cannot sync: {exchange.notes['second_learner']}"
    return judge_after(exchange)


def ask_half(talk: Talk) -> None:
    """A learner that is gone between two parts of an update."""
    peer = sync(talk, 0)
    first, _ = halves(talk.subject.policies.weights(1))
    peer.send(first)
    peer.group = None
    talk.exchange.calls.clear()
    peer.release()
    write(talk, "after")
    expect(talk, "after", 0)
    if (after := talk.exchange.one("after")).is_ok or after.is_refusal:  # an engine that has died takes no update
        ask_next(talk)


@check(
    "a-dead-learner-leaves-no-half-update",
    "After a learner is gone between two parts of an update, calls SHOULD use the old weights or be rejected, and the "
    "next update is served.",
    clause="servers/one-learner-at-a-time-opens-the-weight-group#7",
    grade=SHOULD,
    dialects=("swift", "trl", "vllm"),
    ask=ask_half,
    since="2026-11-27",
    needs=NEEDS,
    is_dangerous=True,
    requires=("new-weights-are-served", "recovers-from-a-dead-learner", "no-half-update-is-served"),
    deadline_s=240,
)
def judge_half(exchange: Exchange) -> str:
    after = exchange.one("after")
    if not after.is_ok and not after.is_refusal:
        return after.summary()
    if after.is_ok and not was(exchange, "after", 0):
        return "half of an update whose learner is gone is served"
    return "" if was(exchange, "new", BESIDE_EMBEDDINGS) else "the next update is not served"
