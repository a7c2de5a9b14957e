"""Random faults on native doubles: short runs of one or two learner ranks in every mode of overlap.

Each trial is a run of four steps whose servers, connections, disk or clock fail once or twice, and its resumptions.
Transport, fence, retries, overlap and checkpoints are the real ones; ranks are threads. A trial repeats with its
printed number and seed.
"""

import random
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from unittest import mock

import torch

from conformance.doubles.http_server import MSGPACK, http_server, is_packed, send
from conformance.doubles.native_double import ROUTES, NativeDouble, Refused
from conformance.doubles.ranks import Member, Table
from conformance.doubles.started import in_time, journals_of
from conformance.tools.campaign.observe import out_of_order
from conformance.tools.campaign.small_learner import STEPS, LearnerKilled, SmallLearner, plan_of
from conformance.tools.judge import judge
from rollmatch.data.ids import pack_ids, unpack_ids
from rollmatch.errors import RollmatchError
from rollmatch.run.storage import storage_error

BOUND_S, MAX_RUNS, HOUR_S = 60.0, 5, 3600.0
AWAY_S = (1.0, 2.0, 5.0)
"""Less and more than a learner waits."""
OF_SERVER = {
    "connect": {"health": 1, "openapi": 1, "identity": 1},
    "sync": {"communicator": 2, "sync": 1, "sync_again": STEPS - 1, "commit": STEPS, "close_communicator": 2},
    "generation": {"infer": 2 * STEPS, "health": 3 * STEPS},
}
"""Phase -> route -> how many calls may come."""
ON_SERVER = ("kill", "stop", "delay", "away", "truncate", "duplicate", "garbage", "busy")
OF_LEARNER = {
    "learning": ("kill", "clock back", "clock ahead"),
    "checkpoint": ("disk full", "kill", "flip"),
    "resume": ("kill", "cut line"),
}


@dataclass(frozen=True)
class PlannedFault:
    """What goes wrong: ``kind`` at the ``count``-th time that ``place`` is reached (a route, or a part of a step)."""

    phase: str
    kind: str
    place: str
    count: int
    index: int = 0
    """Of the server, or the rank."""


@dataclass(frozen=True)
class TrialShape:
    mode: str
    num_ranks: int
    num_servers: int
    min_servers: int


class ThreadRank(Member):
    """A learner rank; ranks that wait at different places are found out."""

    is_primary = property(lambda self: self.rank == 0)

    def gather(self, item):
        items = super().gather(item)
        assert len({type(each) for each in items}) == 1, f"ranks meet at different places: {items}"
        return items

    def barrier(self):
        self.gather(None)


class FaultyDouble(NativeDouble):
    """Answers with its weights and the prompt's first id, and fails as planned."""

    def __init__(self, faults):
        super().__init__(blank())
        self.planned, self.reached, self.frozen_until, self.away_until = list(faults), Counter(), 0.0, 0.0
        self.call = threading.local()

    def infer(self, body):
        reply = super().infer(body)
        for request, response in zip(body["requests"], reply["responses"], strict=True):
            first = int(unpack_ids(request["prompt_token_ids"])[0])
            response["response_token_ids"] = pack_ids([int(self.served["a"][0]), first])
        return reply | {"responses": reply["responses"][:: -1 if self.call.kind == "reorder" else 1]}

    def sync(self, body):
        if self.staged is not None or body["version"] <= self.policy_version:
            raise Refused("version-not-newer")  # else a call that came twice would wait for another one's bytes
        return super().sync(body)

    def answer(self, handler):
        kind = self.call.kind = self.strike(ROUTES.get(handler.path.rstrip("/")))
        time.sleep(max(0.0, self.frozen_until - time.monotonic()) + 0.2 * (kind == "delay"))
        if kind in ("kill", "away") or time.monotonic() < self.away_until:
            handler.connection.close()
            return
        if handler.command == "GET" and handler.path.startswith("/native/") and "identity" not in handler.path:
            send(handler, 405, {"code": "method-wrong"})  # a learner that looks for routes
            return
        handler.rfile = BytesIO(raw := handler.rfile.read(int(handler.headers.get("Content-Length", 0))))
        if kind in ("truncate", "garbage", "busy"):
            handler.send_response(503 if kind == "busy" else 200)
            handler.send_header("Content-Type", MSGPACK if is_packed(handler) else "application/json")
            handler.send_header("Content-Length", "400" if kind == "truncate" else "4")
            handler.end_headers()
            handler.wfile.write(b"\xc1\x00{]")
            return
        if kind == "duplicate":
            super().answer(mock.Mock(path=handler.path, headers=handler.headers, rfile=BytesIO(raw)))
        super().answer(handler)

    def strike(self, name):
        """The kind of the fault that is planned for this call."""
        with self.lock:
            self.reached[name] += 1
            fault = next(
                (each for each in self.planned if (each.place, each.count) == (name, self.reached[name])), None
            )
            if fault is None:
                return ""
            self.planned.remove(fault)
            if fault.kind in ("kill", "away"):
                self.restart(blank())
            self.frozen_until = time.monotonic() + 1.5 * (fault.kind == "stop")
            self.away_until = time.monotonic() + AWAY_S[fault.count % 3] * (fault.kind == "away")
            return fault.kind


def blank():
    """Weights of a server that has just started."""
    return {"a": torch.zeros(2), "b": torch.zeros(3)}


def draw(number, seed):
    """The shape and the faults of a trial."""
    chance, faults = random.Random(f"{seed}-{number}"), []
    num_servers = chance.choice((1, 2))
    shape = TrialShape(
        mode=chance.choice(("off", "ahead")),
        num_ranks=chance.choice((1, 2)),
        num_servers=num_servers,
        min_servers=chance.randint(1, num_servers),
    )
    for _ in range(chance.randint(1, 3)):
        phase = chance.choice([*OF_SERVER, "sync", "generation", *OF_LEARNER])
        if phase in OF_SERVER:
            place, size = chance.choice([*OF_SERVER[phase]]), num_servers
            kind, most = (
                chance.choice([*ON_SERVER, *(("reorder",) if place == "infer" else ())]),
                OF_SERVER[phase][place],
            )
        else:
            place, kind, size = phase, chance.choice(OF_LEARNER[phase]), shape.num_ranks
            most = 1 if phase == "resume" else STEPS
        index = 0 if kind == "flip" else chance.randrange(size)
        faults.append(PlannedFault(phase, kind, place, chance.randint(1, most), index))
    return shape, list(dict.fromkeys(faults))


def attempt(learners):
    """How the processes of a run ended: finished, killed, the code of an error, ``hang``, or ``UNNAMED`` and the error.

    The end of one rank ends the others, as torchrun does.
    """
    ends = []

    def work(learner):
        try:
            learner.run()
            ends.append("finished")
            return
        except LearnerKilled:
            ends.append("killed")
        except threading.BrokenBarrierError:
            pass
        except Exception as error:  # noqa: BLE001  # an error of any kind that has no name is what is looked for
            known = error if isinstance(error, RollmatchError) else storage_error(error)
            ends.append(known.code if known else f"UNNAMED {type(error).__name__}: {error}")
        learner.ranks.table.barrier.abort()

    now, jumped = time.time, [0.0]
    for learner in learners:
        learner.jumped = jumped
    threads = [threading.Thread(target=work, args=(learner,), daemon=True) for learner in learners]
    deadline = time.monotonic() + BOUND_S
    with mock.patch("time.time", side_effect=lambda: now() + jumped[0] * HOUR_S):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        return "hang"
    return next((end for end in sorted(ends, key=lambda end: "UNNAMED" not in end) if end != "finished"), "finished")


def judged(journals, outcomes, shape):
    """What is wrong with a trial, in words."""
    wrong = [each for each in outcomes if each == "hang" or each.startswith("UNNAMED")]
    if outcomes[-1] != "finished":
        wrong.append(f"not finished after {len(outcomes)} runs")
    age, taught = int(shape.mode == "ahead"), []
    for rank, events in enumerate(journals):
        steps = [event for event in events if event["event"] == "learned"]
        wrong += [
            f"rank {rank} {problem}" for problem in out_of_order(events, plan_of(shape.num_ranks, rank), "learned")
        ]
        for event in steps:
            step = event["step"]
            for index, (weights, first), sent in zip(event["sample_ids"], event["read"], event["sent"], strict=True):
                if first != 100 + index or weights != sent + 1 or not step - age <= sent <= step:
                    wrong.append(
                        f"step {step}, sample {index}: {first - 100} answered by weights of step {weights - 1}"
                    )
        taught += chain.from_iterable({event["step"]: event["sample_ids"] for event in steps}.values())
    if outcomes[-1] == "finished" and sorted(taught) != list(range(len(taught))):
        wrong.append(f"samples were lost or repeated: {taught}")
    return wrong


def trial(number, seed):
    """(faults that have struck, outcomes of its runs, what is wrong)."""
    shape, faults = draw(number, seed)
    left, outcomes = [fault for fault in faults if fault.phase in OF_LEARNER], []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        of_server = [
            [f for f in faults if f.phase in OF_SERVER and f.index == index] for index in range(shape.num_servers)
        ]
        doubles = [FaultyDouble(mine) for mine in of_server]
        urls = [stack.enter_context(http_server(double.answer)).url for double in doubles]
        while len(outcomes) < MAX_RUNS and outcomes[-1:] not in (["finished"], ["hang"]):
            table = Table(shape.num_ranks)
            table.barrier = threading.Barrier(shape.num_ranks, timeout=2 * BOUND_S)
            members = [ThreadRank(rank, shape.num_ranks, table) for rank in range(shape.num_ranks)]
            for double in doubles if outcomes else ():  # who resumes a run restarts its servers first
                time.sleep(max(0.0, double.away_until - time.monotonic()))
            outcomes.append(attempt([SmallLearner(Path(name), urls, shape, member, left) for member in members]))
            if outcomes[-1] == "killed" and any(fault.kind == "cut line" for fault in faults):
                with (Path(name) / "journal.jsonl").open("a") as file:
                    file.write('{"event": "lear')
        left += [fault for double in doubles for fault in double.planned]
        struck = [fault for fault in faults if fault not in left]
        journals = journals_of(Path(name), num_ranks=shape.num_ranks)
    wrong = judged(journals, outcomes, shape)
    if not any("clock" in fault.kind for fault in struck):  # the judge compares times
        breaches = judge(in_time(journals), max_staleness=int(shape.mode == "ahead"))
        wrong += [f"{breach.rule}: {breach.problem}" for breach in breaches]
    return struck, outcomes, wrong
