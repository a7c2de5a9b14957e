"""Workers that die, and the end of the server. Only for servers that the judge started."""

import time

from conformance.judge.servers.check import SHOULD, check
from conformance.judge.servers.exchange import Exchange, RecordedCall
from conformance.judge.servers.talk import Talk

DEATH_S, END_S = 10.0, 20.0


def ask_dead_worker(talk: Talk) -> None:
    """Ends every process that is not the one which answers HTTP."""
    victims = talk.subject.process.workers()
    for process in victims:
        process.kill()
    talk.note("num_workers", len(victims))
    deadline = time.monotonic() + DEATH_S
    while time.monotonic() < deadline:
        call = talk.get("health", talk.subject.dialect.health_path, timeout_s=5, note=False)
        if not call.is_ok:
            break
        time.sleep(0.2)
    talk.exchange.calls.append(call)


@check(
    "health-reports-a-dead-worker",
    "Within 10 s of the workers' death, health SHOULD NOT be 200 or hang, unless the port is closed.",
    clause="servers/a-server-can-be-found-and-watched#6",
    grade=SHOULD,
    ask=ask_dead_worker,
    needs=("process",),
    is_dangerous=True,
    deadline_s=40,
)
def judge_dead_worker(exchange: Exchange) -> str:
    if not exchange.notes["num_workers"]:
        return "there is no process of workers"
    call = exchange.one("health")
    if call.failure == "ReadTimeout":
        return f"health is not answered at all: {call.summary()}"
    return f"health still answers {call.status}" if call.is_ok else ""


def ask_end(talk: Talk) -> None:
    import psutil  # servers that the judge started itself run where it is installed

    process = talk.subject.process
    members = process.members()
    began = time.monotonic()
    process.process.terminate()
    _, alive = psutil.wait_procs(members, timeout=END_S)
    talk.exchange.calls.append(
        RecordedCall(
            label="end", method="SIGNAL", path="SIGTERM", status=200, seconds=round(time.monotonic() - began, 1)
        )
    )
    talk.note("left", len(alive))


@check(
    "a-signal-ends-all",
    "A SIGTERM SHOULD end the server and all its processes within 20 s.",
    clause="servers/a-server-can-be-found-and-watched#7",
    grade=SHOULD,
    ask=ask_end,
    needs=("process",),
    is_dangerous=True,
    deadline_s=40,
)
def judge_end(exchange: Exchange) -> str:
    left = exchange.notes["left"]
    return f"{left} processes are left {END_S:g} s after SIGTERM" if left else ""
