"""``python -m conformance.harness.faults [--stale] [--moved] [--only WORD] [--workers N]``: try faults.

Each fault runs in a forked process, on only those tests that claim to notice it (``workers.py``). ``--stale`` leaves
out those whose row is fresh: neither the fault nor its tests have changed. ``--moved`` leaves out fewer: nothing of
ours has changed that the trial ran. ``--only`` leaves out those whose id does not hold the word. Rows that are left out
stay; the ledger is written as results come in. What took longest is told at the end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from conformance.harness.faults.bank import BANK
from conformance.harness.faults.book import Book, read_ledger
from conformance.harness.faults.preload import preload
from conformance.harness.faults.rests import digests_now, read_rests
from conformance.harness.faults.subject import SUBJECTS, change_for
from conformance.harness.faults.trial import Answer, Trial
from conformance.harness.faults.workers import Tried, Workers

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "impl"), str(ROOT)]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
PROCESSES_OF_THEIR_OWN = ("conformance/launch/", "conformance/trainer/")
"""Tests that start them take longest, and are tried first: what is quick then fills what is left."""
TOLD = 8
CLAIMS = """
import json, sys
from conformance.harness.binding.binding import bind
from conformance.harness.binding.claim import read_claims
from conformance.harness.catalogue import load_catalogue
from conformance.harness.faults.claimed import tests_by_fault
from conformance.harness.faults.ledger import judged_tests
claims = read_claims()
print(json.dumps([tests_by_fault(claims), {c.test: c.digest for c in claims.found},
                  sorted(judged_tests(bind(claims, load_catalogue())))]))
"""
"""Run apart: reading the specification imports a part of the implementation, and here nothing of it may be."""


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 when every fault was noticed by every test that claims to."""
    parser = argparse.ArgumentParser(prog="python -m conformance.harness.faults")
    parser.add_argument("--only", default="", help="faults whose id holds this word")
    parser.add_argument("--stale", action="store_true", help="only what has changed since it was tried")
    parser.add_argument("--moved", action="store_true", help="also where code has changed that the trial ran")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--times", type=Path, help="write processor seconds, seconds and name of each trial")
    options = parser.parse_args(arguments)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    began = time.perf_counter()
    claimed, digests, judged = _read_claims()
    trials = sorted(_trials(claimed, judged, options.only), key=_is_quick)
    if options.stale or options.moved:
        moved, ledger, rests = _moved() if options.moved else set(), read_ledger(), read_rests()
        trials = [t for t in trials if t.name in moved or not _is_fresh(t, digests, ledger=ledger, rests=rests)]
    tried, book = [], Book(digests=digests)
    try:
        for each in _try_all(trials, num_workers=options.workers):
            tried.append(each)
            book.enter(each)
    finally:
        book.write()
    if options.times:
        lines = (f"{each.cpu_s:.2f}\t{each.wall_s:.2f}\t{each.trial.name}\n" for each in tried)
        options.times.write_text("".join(lines), encoding="utf-8")
    longest = sorted(tried, key=lambda each: -each.wall_s)[:TOLD]
    _say(f"{len(tried)} trials in {time.perf_counter() - began:.0f} s, {len(book.bad)} of them bad\n")
    _say("".join(f"{each.wall_s:5.0f} s {each.trial.name}\n" for each in longest))
    _say("".join(f"{line}\n" for line in book.bad))
    return 1 if book.bad else 0


def _moved() -> set[str]:
    """Faults whose trial ran code of ours that does not stand any more as it did, or tells of none."""
    now, rests = digests_now(), read_rests()
    return {fault_id for fault_id in BANK if not now.issuperset(rests.get(fault_id, [""]))}


def _is_fresh(trial: Trial, digests: dict[str, str], *, ledger: Any, rests: Collection[str]) -> bool:
    """``rests``: faults that tell what their verdict rests on."""
    name, tests = trial.name, trial.tests
    if name in ledger["subjects"]:
        return set(ledger["subjects"][name]["tests"]) == set(tests) and not ledger["subjects"][name]["passed"]
    row = ledger["faults"].get(name)
    if row is None or name not in rests:
        return False
    rows = {test: each["digest"] for test, each in row["tests"].items()}
    return bool(row["digest"] == BANK[name].digest and rows == {test: digests[test] for test in tests})


def _read_claims() -> Any:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'impl'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", CLAIMS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    return json.loads(done.stdout)


def _trials(claimed: Any, judged: list[str], only: str) -> Iterator[Trial]:
    for subject in SUBJECTS:
        if only in subject:
            yield Trial(name=subject, tests=judged, change_of=partial(change_for, subject))
    for fault_id, fault in BANK.items():
        if only in fault_id:
            yield Trial(name=fault_id, tests=claimed.get(fault_id, []), change_of=fault.change_of, fault=fault)


def _is_quick(trial: Trial) -> bool:
    return not any(test.startswith(PROCESSES_OF_THEIR_OWN) for test in trial.tests)


def _try_all(trials: list[Trial], *, num_workers: int) -> Iterator[Tried]:
    nothing = Answer(outcomes={}, rests=[])
    yield from (Tried(trial=trial, answer=nothing, wall_s=0, cpu_s=0) for trial in trials if not trial.tests)
    claimed = [trial for trial in trials if trial.tests]
    if claimed:
        preload()
        with tempfile.TemporaryDirectory() as folder:
            yield from Workers(claimed, Path(folder), num_workers=num_workers).try_all()


def _say(text: str) -> None:
    sys.stdout.write(text)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # what torch has loaded is not taken down one by one
