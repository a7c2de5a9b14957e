"""What is seen of real processes while faults strike: journals, ends, and how fast health answers."""

import json
import re
import threading
import time
from contextlib import suppress
from itertools import chain

import numpy
import requests

from conformance.doubles.digits import ROOT
from conformance.doubles.started import in_time
from conformance.tools.judge import judge
from rollmatch.data import StepShape, WindowPlan

CODES = frozenset(re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs/reference/errors.md").read_text(), re.MULTILINE))
LOOK_EVERY_S, LOOK_TIMEOUT_S = 0.1, 10.0


class HealthLooks:
    """Requests the health of a server all the time; looks during a fault of the server's own do not count."""

    def __init__(self):
        self.seconds, self.num_failed, self._watched = [], 0, (None, 0)
        threading.Thread(target=self._look, daemon=True).start()

    def watch(self, port):
        """From now on; a look that is under way does not count."""
        self._watched = port, self._watched[1] + 1

    def _look(self):
        while True:
            time.sleep(LOOK_EVERY_S)
            port, _ = watched = self._watched
            if port is None:
                continue
            began, is_well = time.monotonic(), False
            with suppress(requests.RequestException):
                is_well = requests.get(f"http://127.0.0.1:{port}/health/", timeout=LOOK_TIMEOUT_S).ok
            if watched == self._watched:
                self.seconds.append(time.monotonic() - began)
                self.num_failed += not is_well

    def p99(self):
        return float(numpy.quantile(self.seconds or [0.0], 0.99))

    def shown(self):
        p50, p99, most = numpy.quantile(self.seconds or [0.0], (0.5, 0.99, 1.0))
        figures = f"p50 {p50:.3f} s, p99 {p99:.3f} s, max {most:.3f} s"
        return f"{len(self.seconds)} looks, {figures}, {self.num_failed} failed"


class JournalTail:
    """Events as they are appended to a journal."""

    def __init__(self, path):
        self.path, self._place, self.num_steps, self.last_step = path, 0, 0, 0

    def read(self):
        """New whole lines."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            self._place = file.seek(min(self._place, self.path.stat().st_size))  # less where the journal was cut
            whole = file.read().rpartition(b"\n")[0]
        self._place += len(whole) + bool(whole)
        events = [
            json.loads(line) for line in whole.splitlines() if line.startswith(b'{"event"') and line.endswith(b"}")
        ]
        for event in events:
            if event["event"] == "step":
                self.num_steps, self.last_step = self.num_steps + 1, event["step"]
        return events

    def wait_for(self, is_wanted, goes_on, bound_s):
        """Whether an event that is wanted comes while ``goes_on`` holds."""
        deadline = time.monotonic() + bound_s
        self.read()
        while goes_on() and time.monotonic() < deadline:
            if any(is_wanted(event) for event in self.read()):
                return True
            time.sleep(0.004)
        return False


def name_of_end(code, output):
    """Killed, interrupted, the code of an error, or ``UNNAMED`` and what was printed."""
    named = re.search(r"^ +1\. \[([a-z-]+)\]", output, re.MULTILINE)
    if code is None or code < 0:
        return "killed" if code in (None, -9) else f"UNNAMED: ended by signal {-code}: {output[-600:]}"
    if code in (130, 143):
        return "interrupted"
    if code != 1 or named is None or named[1] not in CODES or "Traceback (most recent call last)" in output:
        return f"UNNAMED: exit code {code}: {output[-1500:]}"
    return named[1]


def out_of_order(events, plan, *kinds):
    """What a rank did with other samples, or at another step, than was to follow, in words."""
    following = {}
    for event in events:
        kind, step = event["event"], event.get("step")
        if kind == "run":
            following = dict.fromkeys(kinds, event["resumed_from"] or 0)
        elif kind in kinds and event.get("purpose") != "eval":
            ids, wanted = event["sample_ids"], list(plan.at(step).sample_indices)
            if kind == "packed":
                ids, wanted = sorted(chain(*ids)), sorted(wanted)
            if step != following[kind] or ids != wanted:
                yield f"{kind} {ids} at step {step}, where {following[kind]} was to follow"
            following[kind] = step + 1


def judge_story(journals, *, mode, num_samples, accumulation):
    """What is wrong with the journals of a run, one per rank, in words."""
    wrong = [f"{b.rule}: {b.problem}" for b in judge(in_time(journals), max_staleness=int(mode == "ahead"))]
    shape = StepShape(batch_size=1, accumulation=accumulation, learner_world_size=len(journals))
    for rank, events in enumerate(journals):
        plan, saved = WindowPlan(num_samples, seed=42, shape=shape, rank=rank), [0]
        wrong += [f"rank {rank} {problem}" for problem in out_of_order(events, plan, "requested", "packed")]
        for event in events:
            if event["event"] == "run":
                start = event["resumed_from"] or 0
                if start < min(saved[-2:]):  # the newest may have been damaged
                    wrong.append(f"rank {rank} continued from step {start}, though {saved[-2:]} were saved")
                saved = [each for each in saved if each <= start]
            elif event["event"] == "saved":
                saved.append(event["step"])
    return wrong
