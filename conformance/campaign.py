"""Random faults against a learner and native doubles: ``python -m conformance.campaign --seed S --minutes M``.

Each trial is a run of four steps whose servers, connections, disk or clock fail once or twice, and its resumptions. The
journal, the checkpoints and what was learned are judged: no hang, no response by other weights than those of its step,
no sample lost or learned from twice, errors with names only. A trial repeats with its printed number and seed.
"""

import argparse
import errno
import logging
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from conformance.doubles.http_server import MSGPACK, http_server, is_packed, read_body
from conformance.rollout.attached import sender_of
from conformance.rollout.test_vllm_server import GREEDY, TEMPLATE, requests_of
from conformance.weights.native_double import ROUTES, NativeDouble
from rollmatch.checkpoint import checkpoints_in, find_damage, step_of, write_manifest
from rollmatch.cli.main import _storage_error
from rollmatch.data import LearnerOrder
from rollmatch.data.ids import pack_ids, unpack_ids
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.dialects.watch import WatchRules
from rollmatch.errors import RollmatchError
from rollmatch.journal import Journal, read_journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.fence import Fence
from rollmatch.rollout.retry import CallRules
from rollmatch.rollout.source import RolloutSource
from rollmatch.rollout.vllm_server import VllmServerBackend

STEPS, BATCH, BOUND_S, BUDGET_S, MAX_RUNS = 4, 3, 60.0, 3.0, 3
STATES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")
OF_SERVER = {
    "connect": ("health", "openapi", "identity"),
    "sync": ("communicator", "sync", "sync_again", "commit", "close_communicator"),
    "generation": ("infer", "health"),
}
ON_SERVER = ("kill", "stop", "delay", "truncate", "duplicate", "reorder", "garbage", "busy")
OF_LEARNER = {
    "learning": ("kill", "clock"),
    "checkpoint": ("disk full", "kill", "flip"),
    "resume": ("kill", "cut line"),
}
SETTINGS = ClientSettings(timeout_s=3, watch=WatchRules(poll_s=0.05, look_timeout_s=0.3, silence_s=0.6, stall_s=2.0))


@dataclass(frozen=True)
class PlannedFault:
    """What goes wrong: ``kind`` at the ``count``-th time that ``place`` is reached (a route, or a part of a step)."""

    phase: str
    kind: str
    place: str
    count: int
    server: int = 0


class LearnerKilled(BaseException):
    """The learner's process ends here."""


class FaultyDouble(NativeDouble):
    """Answers with its weights and the prompt's first id, and fails as planned."""

    def __init__(self, faults):
        super().__init__(blank())
        self.planned, self.reached, self.frozen_until = list(faults), Counter(), 0.0

    def infer(self, body):
        told = super().infer(body)
        for request, response in zip(body["requests"], told["responses"], strict=True):
            first = int(unpack_ids(request["prompt_token_ids"])[0])
            response["response_token_ids"] = pack_ids([int(self.served["a"][0]), first])
        return told

    def answer(self, handler):
        name = ROUTES.get(handler.path.rstrip("/"))
        self.reached[name] += 1
        fault = next((each for each in self.planned if (each.place, each.count) == (name, self.reached[name])), None)
        kind = fault.kind if fault else ""
        self.planned = [each for each in self.planned if each is not fault]
        if kind == "stop":
            self.frozen_until = time.monotonic() + 1.5
        time.sleep(max(0.0, self.frozen_until - time.monotonic()) + 0.2 * (kind == "delay"))
        if kind == "kill":
            self.restart(blank())
            handler.connection.close()
        elif kind == "duplicate":
            raw = read_body(handler)
            with mock.patch("conformance.weights.native_double.read_body", return_value=raw):
                super().answer(mock.Mock(path=handler.path, headers=handler.headers))
                super().answer(handler)
        elif kind in ("truncate", "garbage", "busy"):
            read_body(handler)
            handler.send_response(503 if kind == "busy" else 200)
            handler.send_header("Content-Type", MSGPACK if is_packed(handler) else "application/json")
            handler.send_header("Content-Length", "400" if kind == "truncate" else "4")
            handler.end_headers()
            handler.wfile.write(b"\xc1\x00{]")
        elif kind == "reorder":
            infer = self.infer
            self.infer = lambda body: (told := infer(body)) | {"responses": told["responses"][::-1]}
            super().answer(handler)
            del self.infer
        else:
            super().answer(handler)


def blank():
    return {"a": torch.zeros(2), "b": torch.zeros(3)}


def weights_at(step):
    """After ``step`` optimizer steps; zeros are those of a server that has just started."""
    return {"a": torch.full((2,), step + 1.0), "b": torch.full((3,), step + 1.0)}


class SmallLearner:
    """One process of a run, from connecting to its end."""

    def __init__(self, folder, urls, faults):
        self.folder, self.urls, self.planned, self.reached = folder, urls, list(faults), Counter()
        self.jump_s = 0.0

    def happen(self, place):
        """Fail if it is planned here."""
        self.reached[place] += 1
        for fault in self.planned:
            if (fault.place, fault.count) == (place, self.reached[place]):
                self.planned.remove(fault)
                return fault.kind
        return ""

    def run(self):
        with ExitStack() as stack:
            journal = Journal(self.folder / "journal.jsonl")
            stack.callback(journal.close)
            start = max((step_of(each) for each in checkpoints_in(self.folder) if not find_damage(each)), default=0)
            journal.write("run", resumed_from=start)
            if self.happen("resume"):
                raise LearnerKilled
            source = self.connect(journal, stack)
            order = list(LearnerOrder(STEPS * BATCH, seed=1))
            stack.enter_context(
                mock.patch("rollmatch.journal.time.time", side_effect=lambda: time.monotonic() + self.jump_s)
            )
            for step in range(start, STEPS):
                self.take_step(source, step, order[step * BATCH :][:BATCH])
            journal.write("finished", step=STEPS)

    def connect(self, journal, stack):
        servers = [RolloutServer(url, SETTINGS) for url in self.urls]
        for server in servers:
            server.connect()
        backend = VllmServerBackend(servers, TEMPLATE, Ranks(), sender=sender_of(servers), journal=journal)
        stack.callback(backend.close)
        backend.remake_sender = lambda indices: sender_of([servers[index] for index in indices])
        backend.call_rules = CallRules(retry_budget_s=BUDGET_S, num_ids=200)
        parts = {"template": TEMPLATE, "decoding": GREEDY, "eval_decoding": GREEDY, "run_seed": 1}
        return RolloutSource(fence=Fence(backend, Ranks(), journal), journal=journal, ranks=Ranks(), **parts)

    def take_step(self, source, step, ids):
        source.sync(step, lambda: iter(weights_at(step).items()))
        pool = requests_of(STEPS * BATCH)
        source.journal.write("requested", step=step, sample_ids=ids)
        rollouts = source.generate([pool[index] for index in ids], GREEDY)
        if (kind := self.happen("learning")) == "kill":
            raise LearnerKilled
        self.jump_s -= 3600.0 * (kind == "clock")
        read = [rollout.response_token_ids for rollout in rollouts]
        source.journal.write("learned", step=step, sample_ids=ids, read=read, version=source.policy_version)
        self.save(self.folder / f"checkpoint-{step + 1}")

    def save(self, folder):
        folder.mkdir(exist_ok=True)
        kind = self.happen("checkpoint")
        for name in STATES:
            (folder / name).write_text(f"{folder.name} {name}")
            if kind == "disk full":
                raise OSError(errno.ENOSPC, "No space left on device")
            if kind == "kill":
                raise LearnerKilled
        write_manifest(folder)
        if kind == "flip":
            (folder / STATES[1]).write_text(f"{folder.name} {STATES[2]}")
            raise LearnerKilled


def draw(number, seed):
    """The faults of a trial, and its number of servers."""
    chance, faults = random.Random(f"{seed}-{number}"), []
    num_servers = chance.choice((1, 2))
    for _ in range(chance.choice((1, 1, 2))):
        phase = chance.choice([*OF_SERVER, *OF_LEARNER])
        if phase in OF_SERVER:
            place, kind = chance.choice(OF_SERVER[phase]), chance.choice(ON_SERVER)
        else:
            place, kind = phase, chance.choice(OF_LEARNER[phase])
        count = 1 if phase in ("resume", "connect") else chance.randint(1, STEPS)
        faults.append(PlannedFault(phase, kind, place, count, chance.randrange(num_servers)))
    return num_servers, faults


def attempt(learner):
    """How a process of the run ended: finished, killed, the code of an error, ``hang`` or ``UNNAMED`` and the error."""
    outcome = ["hang"]

    def work():
        try:
            learner.run()
            outcome[0] = "finished"
        except LearnerKilled:
            outcome[0] = "killed"
        except Exception as error:  # noqa: BLE001  # an error of any kind that has no name is what is looked for
            known = error if isinstance(error, RollmatchError) else _storage_error(error)
            outcome[0] = known.code if known else f"UNNAMED {type(error).__name__}: {error}"

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(BOUND_S)
    return outcome[0]


def judged(events, outcomes):
    """What is wrong with a trial, in words."""
    wrong = [each for each in outcomes if each == "hang" or each.startswith("UNNAMED")]
    if outcomes[-1] != "finished":
        wrong.append(f"not finished after {len(outcomes)} runs")
    learned, order = {}, list(LearnerOrder(STEPS * BATCH, seed=1))
    for event in (each for each in events if each["event"] == "learned"):
        learned[event["step"]] = event["sample_ids"]
        wanted = [[event["step"] + 1, 100 + index] for index in event["sample_ids"]]
        if event["read"] != wanted:
            wrong.append(f"step {event['step']} learned from {event['read']}, not {wanted}")
    whole = {step: order[step * BATCH :][:BATCH] for step in range(STEPS)}
    if outcomes[-1] == "finished" and learned != whole:
        wrong.append(f"samples were lost, repeated or in another order: {learned}")
    return wrong


def trial(number, seed):
    """(faults that have struck, outcomes of its runs, what is wrong)."""
    num_servers, faults = draw(number, seed)
    of_learner = [fault for fault in faults if fault.phase in OF_LEARNER]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        of_server = [[f for f in faults if f.phase in OF_SERVER and f.server == index] for index in range(num_servers)]
        doubles = [FaultyDouble(mine) for mine in of_server]
        urls = [stack.enter_context(http_server(double.answer)).url for double in doubles]
        outcomes, folder = [], Path(name)
        while len(outcomes) < MAX_RUNS and outcomes[-1:] not in (["finished"], ["hang"]):
            learner = SmallLearner(folder, urls, of_learner)
            outcomes.append(attempt(learner))
            of_learner = learner.planned
            if outcomes[-1] == "killed" and any(fault.kind == "cut line" for fault in faults):
                with (folder / "journal.jsonl").open("a") as file:
                    file.write('{"event": "lear')
        left = [fault for one in (*doubles, learner) for fault in one.planned]
        faults = [fault for fault in faults if fault not in left]
        return faults, outcomes, judged(read_journal(folder / "journal.jsonl"), outcomes)


def campaign(seed, *, num_trials=10**9, minutes=1e9, show=print):
    """Run trials; returns the number of faults, of findings, and how often runs ended in which way."""
    deadline, num_faults, num_found, ends = time.monotonic() + 60 * minutes, 0, 0, Counter()
    for number in range(num_trials):
        if time.monotonic() > deadline:
            break
        faults, outcomes, wrong = trial(number, seed)
        num_faults, num_found = num_faults + len(faults), num_found + len(wrong)
        ends.update(outcomes)
        for problem in wrong:
            show(f"seed {seed}, trial {number}: {problem}\n    {faults}\n    {outcomes}")
    show(f"seed {seed}: {num_faults} faults, {num_found} findings; runs ended: {dict(ends.most_common())}")
    return num_faults, num_found, ends


def main():
    logging.getLogger("rollmatch").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--minutes", type=float, default=5.0)
    return int(campaign(**vars(parser.parse_args()))[1] > 0)


if __name__ == "__main__":
    sys.exit(main())
