"""``python -m conformance.harness.faults [--stale] [--moved] [--only WORD] [--workers N]``: try faults.

Each fault runs in a forked process, on only those tests that claim to notice it. ``--stale`` leaves out those whose row
is fresh: neither the fault nor its tests have changed. ``--moved`` leaves out fewer: nothing of ours has changed that
the trial ran. ``--only`` leaves out those whose id does not hold the word. Rows that are left out stay; the ledger is
written as results come in. What took longest is told at the end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
LEDGER = Path(__file__).with_name("ledger.json")
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
    options = parser.parse_args(arguments)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    began = time.perf_counter()
    claimed, digests, judged = _read_claims()
    from conformance.harness.faults.bank import BANK
    from conformance.harness.faults.rests import read_rests, write_rests
    from conformance.harness.faults.trial import preload

    trials = list(_trials(claimed, judged, options.only))
    if options.stale or options.moved:
        moved, ledger, rests = _moved() if options.moved else set(), _read_ledger(), read_rests()
        trials = [
            trial
            for trial in trials
            if trial[0] in moved or not _is_fresh(*trial[:2], digests, ledger=ledger, rests=rests)
        ]
    if trials:
        preload()
    bad: list[str] = []
    seconds: dict[str, float] = {}
    for name, outcomes, ran, seconds[name] in _try_all(trials, workers=options.workers):
        bad += _write(name, outcomes, digests)
        write_rests({fault_id: rest for fault_id, rest in (read_rests() | {name: ran}).items() if fault_id in BANK})
    longest = sorted(seconds, key=lambda name: -seconds[name])[:TOLD]
    _say(f"{len(seconds)} trials in {time.perf_counter() - began:.0f} s, {len(bad)} of them bad\n")
    _say("".join(f"{seconds[name]:5.0f} s {name}\n" for name in longest))
    for line in bad:
        _say(f"{line}\n")
    return 1 if bad else 0


def _moved() -> set[str]:
    """Faults whose trial ran code of ours that does not stand any more as it did, or tells of none."""
    from conformance.harness.faults.bank import BANK
    from conformance.harness.faults.rests import digests_now, read_rests

    now, rests = digests_now(), read_rests()
    return {fault_id for fault_id in BANK if not now.issuperset(rests.get(fault_id, [""]))}


def _read_ledger() -> Any:
    return json.loads(LEDGER.read_text(encoding="utf-8")) if LEDGER.exists() else {"faults": {}, "subjects": {}}


def _is_fresh(name: str, tests: list[str], digests: dict[str, str], *, ledger: Any, rests: Collection[str]) -> bool:
    """``rests``: faults that tell what their verdict rests on."""
    from conformance.harness.faults.bank import BANK

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


def _trials(claimed: Any, judged: list[str], only: str) -> Iterator[tuple[str, list[str], Callable[[str], Any]]]:
    """(name, tests, change of a module)."""
    from conformance.harness.faults.bank import BANK
    from conformance.harness.faults.subject import SUBJECTS, change_for

    for subject in SUBJECTS:
        if only in subject:
            yield subject, judged, lambda module, subject=subject: change_for(subject, module)
    for fault_id, fault in BANK.items():
        if only in fault_id:
            tests = claimed.get(fault_id, [])
            yield fault_id, tests, lambda module, fault=fault: fault.apply if module == fault.module else None


def _is_quick(trial: tuple[str, list[str], Any]) -> bool:
    return not any(test.startswith(PROCESSES_OF_THEIR_OWN) for test in trial[1])


def _try_all(trials: list[Any], *, workers: int) -> Iterator[tuple[str, Any, list[str], float]]:
    """(name, test -> outcome, what it rests on, seconds), as trials end."""
    from conformance.harness.faults.bank import BANK
    from conformance.harness.faults.trial import read_ran, read_trial, start_trial

    running: dict[int, tuple[str, list[str], Path, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        waiting = sorted(trials, key=_is_quick)
        while waiting or running:
            while waiting and len(running) < workers:
                name, tests, change_of = waiting.pop(0)
                out = Path(folder) / f"{name}.json"
                if tests:
                    began = time.perf_counter()
                    running[start_trial(tests, change_of, out, fault=BANK.get(name))] = (name, tests, out, began)
                else:
                    yield name, {}, [], 0.0
            if running:
                child, _ = os.wait()
                name, tests, out, began = running.pop(child)
                outcomes = {test: asdict(each) for test, each in read_trial(out, tests).items()}
                yield name, outcomes, read_ran(out), time.perf_counter() - began


def _write(name: str, outcomes: dict[str, dict[str, str]], digests: dict[str, str]) -> list[str]:
    """Put one trial into the ledger; returns what is bad. Imports nothing of the implementation: more forks follow."""
    from conformance.harness.faults.bank import BANK
    from conformance.harness.faults.subject import SUBJECTS

    ledger = _read_ledger()
    verdicts = {test: each["verdict"] for test, each in outcomes.items()}
    if name in SUBJECTS:
        passed, skipped = (sorted(t for t, v in verdicts.items() if v == what) for what in ("passed", "skipped"))
        ledger["subjects"][name] = {"passed": passed, "tests": sorted(verdicts.keys() - set(skipped))}
        bad = [f"{name}: {test} {verdicts[test]}" for test in (*passed, *skipped)]
    else:
        kills = {t: {"digest": digests[t], "said": e["said"]} for t, e in outcomes.items() if verdicts[t] == "killed"}
        ledger["faults"][name] = {"digest": BANK[name].digest, "tests": kills}
        bad = [f"{name}: {t} {e['verdict']} {e['said']}" for t, e in outcomes.items() if t not in kills]
        bad += [] if outcomes else [f"{name}: no test claims it"]
    for kind, known in (("faults", BANK), ("subjects", SUBJECTS)):
        ledger[kind] = {row_id: row for row_id, row in ledger[kind].items() if row_id in known}
    LEDGER.write_text(json.dumps(ledger, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return bad


def _say(text: str) -> None:
    sys.stdout.write(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
