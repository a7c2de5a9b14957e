"""How a learner and the server's workers meet."""

import socket
import time
from typing import Any

from conformance.servers.check import QUEUED, SHOULD, Check
from conformance.servers.checks.generation import QUESTIONS
from conformance.servers.exchange import Exchange
from conformance.servers.peers import free_port, make_peer, open_peer, sync
from conformance.servers.talk import Stopped, Talk

NEEDS = ("model", "group")
RECOVERY_S = 75.0


def ask_again(talk: Talk) -> None:
    for _ in range(2):
        open_peer(talk).close()
    sync(talk, 0)
    talk.generate("after", QUESTIONS[:1])


def judge_after(told: Exchange) -> str:
    after = told.one("after")
    return "" if after.is_ok else after.tell()


def ask_second(talk: Talk) -> None:
    peer = open_peer(talk)
    second = make_peer(talk)
    if talk.subject.dialect.name == "vllm":
        talk.post("second", "/init_weight_transfer_engine", {"init_info": _elsewhere(peer)}, timeout_s=20)
    else:
        second.init("second", port=free_port())
    peer.send(talk.subject.policies.weights(0))
    peer.finish()
    talk.generate("after", QUESTIONS[:1])


def judge_second(told: Exchange) -> str:
    """Refused; the first one still carries an update."""
    second, after = told.one("second"), told.one("after")
    return "; ".join(c.tell() for c, is_fine in ((second, second.is_refusal), (after, after.is_ok)) if not is_fine)


def ask_nobody(talk: Talk) -> None:
    """Generates while the server waits for a learner that never comes."""
    peer = make_peer(talk)
    waiting = talk.beside(peer.init, "init")
    time.sleep(1.0)
    talk.generate("meanwhile", QUESTIONS[:1], timeout_s=40)
    talk.note("waited", not waiting.done())
    talk.get("health", talk.subject.dialect.health_path, timeout_s=5)


def judge_nobody(told: Exchange) -> str:
    calls = (told.one("meanwhile"), told.one("health"))
    return "; ".join(call.tell() for call in calls if not call.is_ok)


def ask_busy_port(talk: Talk) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        talk.note("port", port)
        make_peer(talk).init("init", port=port)
        talk.generate("after", QUESTIONS[:1])


def judge_busy_port(told: Exchange) -> str:
    call, after = told.one("init"), told.one("after")
    if call.is_ok or str(told.notes["port"]) not in str(call.reply):
        return f"the taken port is not told: {call.tell()}"
    return "" if after.is_ok else after.tell()


def ask_wrong_size(talk: Talk) -> None:
    peer = make_peer(talk)
    peer.init("init", world_size=7)
    talk.generate("after", QUESTIONS[:1])


def judge_wrong_size(told: Exchange) -> str:
    call, after = told.one("init"), told.one("after")
    return "; ".join(c.tell() for c, is_fine in ((call, call.is_refusal), (after, after.is_ok)) if not is_fine)


def ask_dying(talk: Talk) -> None:
    """A learner that announces an update and is gone; then another one comes."""
    peer = open_peer(talk)
    weights = dict(list(talk.subject.policies.weights(0).items())[:1])
    if talk.subject.dialect.name == "vllm":
        peer.begin()
    call: Any = peer.announce(weights, "announced")
    time.sleep(0.5)
    peer.group = None
    if talk.subject.dialect.name != "vllm":  # there, generation stays paused until a learner resumes it
        talk.generate("recovered", QUESTIONS[:1], timeout_s=RECOVERY_S)
    else:
        call.result(timeout=RECOVERY_S)
    if hasattr(call, "result") and not call.done():
        raise Stopped("the announced update is still waited for")
    try:
        _close(talk)
        sync(talk, 0)
    except Stopped as stop:
        talk.note("second_learner", str(stop))
    talk.generate("after", QUESTIONS[:1])


def judge_dying(told: Exchange) -> str:
    if unserved := [call for call in told.all("recovered") if not call.is_ok]:
        return f"{RECOVERY_S:g} s later calls are not served: {unserved[0].tell()}"
    if told.notes.get("second_learner"):
        return f"the next learner cannot sync: {told.notes['second_learner']}"
    return judge_after(told)


def _close(talk: Talk) -> None:
    if talk.subject.dialect.name == "vllm":
        talk.post("resume", "/resume", timeout_s=10)
    else:
        talk.post("close", "/close_communicator/", timeout_s=10)


def _elsewhere(peer: Any) -> dict[str, Any]:
    return {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": peer.size}


CHECKS = (
    Check(
        check_id="a-group-opens-again",
        sentence="A communicator can be closed, opened again at another port, and used for an update.",
        ask=ask_again,
        judge=judge_after,
        needs=NEEDS,
        deadline_s=90,
    ),
    Check(
        check_id="taken-group-port-is-named",
        sentence="A group port in use is rejected with its number; the server continues.",
        grade=SHOULD,
        dialects=("native", *QUEUED),
        ask=ask_busy_port,
        judge=judge_busy_port,
        needs=("group",),
        is_dangerous=True,
        deadline_s=60,
    ),
    Check(
        check_id="wrong-world-size-is-refused",
        sentence="A learner that expects another group size is rejected.",
        grade=SHOULD,
        dialects=("native", *QUEUED),
        ask=ask_wrong_size,
        judge=judge_wrong_size,
        needs=("group",),
        is_dangerous=True,
        deadline_s=60,
    ),
    Check(
        check_id="second-communicator-is-refused",
        sentence="A second communicator is rejected while one is open, and the first one still works.",
        ask=ask_second,
        judge=judge_second,
        needs=NEEDS,
        is_dangerous=True,
        deadline_s=120,
    ),
    Check(
        check_id="serves-while-nobody-joins",
        sentence="While a communicator waits for a learner that never joins, calls are served.",
        grade=SHOULD,
        ask=ask_nobody,
        judge=judge_nobody,
        needs=("group",),
        is_dangerous=True,
        deadline_s=70,
    ),
    Check(
        check_id="recovers-from-a-dead-learner",
        sentence="When a learner dies after announcing an update, calls are served again within 75 s (vllm dialect: "
        "after /resume) and the next learner can sync.",
        grade=SHOULD,
        dialects=("swift", "trl", "vllm"),
        ask=ask_dying,
        judge=judge_dying,
        needs=NEEDS,
        is_dangerous=True,
        deadline_s=240,
    ),
)
