"""Who noticed which fault, and how: written by a run of the whole bank, committed, and checked for freshness.

The check reads sources only; it runs nothing.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from conformance.harness.binding.binding import Binding
from conformance.harness.binding.claim import Claims
from conformance.harness.faults.claimed import tests_by_fault, unknown_faults
from conformance.harness.faults.fault import Fault, SeamGone
from conformance.harness.faults.subject import SUBJECTS
from conformance.harness.spec_error import Finding

LEDGER = Path(__file__).with_name("ledger.json")
OUT_OF_REACH = (
    *("conformance/launch/", "conformance/wire/", "conformance/trainer/test_ddp.py"),
    *(
        "conformance/rollout/test_vllm",
        "conformance/sync/test_ranks_of_learner.py",
        "conformance/rollout/test_tensor_parallel.py",
    ),
)
"""Tests that start processes or engines of their own, which a change in this process does not reach, or not in time."""
AGAIN = "Run python -m conformance.harness.faults."

Ledger = Mapping[str, Any]
"""``faults``: fault -> digest and tests, a test -> digest and said; ``subjects``: subject -> tests and passed."""


def load_ledger(path: Path = LEDGER) -> Ledger:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"faults": {}, "subjects": {}}


def write_ledger(ledger: Ledger, path: Path = LEDGER) -> None:
    path.write_text(json.dumps(ledger, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def check_ledger(ledger: Ledger, claims: Claims, binding: Binding, bank: Mapping[str, Fault]) -> list[Finding]:
    """Every broken rule: an unnoticed fault, a stale row, a scenario that no fault turns red, a hollow subject."""
    return [
        *unknown_faults(claims, bank),
        *_check_seams(bank),
        *_check_rows(ledger, claims, bank),
        *_check_scenarios(ledger, binding),
        *_check_subjects(ledger, binding),
    ]


def faults_by_test(ledger: Ledger) -> dict[str, list[str]]:
    """Test -> faults."""
    found: dict[str, list[str]] = {}
    for fault_id, row in ledger["faults"].items():
        for test in row["tests"]:
            found.setdefault(test, []).append(fault_id)
    return found


def _check_seams(bank: Mapping[str, Fault]) -> Iterator[Finding]:
    for fault in bank.values():
        try:
            fault.apply(fault.path.read_text(encoding="utf-8"))
        except (OSError, SeamGone) as error:
            remedy = "Write the fault anew for the present source."
            yield Finding(code="fault-seam-gone", key=fault.fault_id, problem=f"{error}.", remedy=remedy)


def _check_rows(ledger: Ledger, claims: Claims, bank: Mapping[str, Fault]) -> Iterator[Finding]:
    claimed, digests = tests_by_fault(claims), {claim.test: claim.digest for claim in claims.found}
    for fault_id, fault in bank.items():
        tests, row = claimed.get(fault_id, []), ledger["faults"].get(fault_id, {"digest": "", "tests": {}})
        if not tests:
            remedy = f'Mark one by @pytest.mark.kills("{fault_id}").'
            yield Finding(code="fault-unclaimed", key=fault_id, problem="no test claims to notice it.", remedy=remedy)
        if row["digest"] != fault.digest:
            yield Finding(code="fault-not-tried", key=fault_id, problem="it was never tried like this.", remedy=AGAIN)
        for test in tests:
            stored = row["tests"].get(test)
            if stored is None:
                problem = f"{test} has not been seen to notice it."
                yield Finding(code="fault-unnoticed", key=fault_id, problem=problem, remedy=AGAIN)
            elif stored["digest"] != digests[test]:
                problem = f"{test} has changed since it noticed it."
                yield Finding(code="kill-stale", key=fault_id, problem=problem, remedy=AGAIN)
    for fault_id in sorted(ledger["faults"].keys() - bank.keys()):
        yield Finding(code="ledger-row-unknown", key=fault_id, problem="the bank has no such fault.", remedy=AGAIN)


def _check_scenarios(ledger: Ledger, binding: Binding) -> Iterator[Finding]:
    killing = faults_by_test(ledger)
    for each, tests in binding.tests.items():
        if "#" not in each and not any(test in killing for test in tests):
            problem = f"no fault turns {', '.join(tests)} red."
            remedy = "Add a fault to the bank, and a kills marker to one of its tests."
            yield Finding(code="scenario-vacuous", key=each, problem=problem, remedy=remedy)


def _check_subjects(ledger: Ledger, binding: Binding) -> Iterator[Finding]:
    for subject in SUBJECTS:
        row = ledger["subjects"].get(subject, {"tests": [], "passed": []})
        for test in row["passed"]:
            yield Finding(code="passes-on-nothing", key=test, problem=f"it passes on {subject}.", remedy="Assert more.")
        untried = judged_tests(binding) - set(row["tests"])
        for test in sorted(untried):
            yield Finding(code="subject-not-tried", key=test, problem=f"not tried on {subject}.", remedy=AGAIN)


def judged_tests(binding: Binding) -> set[str]:
    """Tests that show scenarios: those that the two hollow subjects must fail."""
    shown = {test for each, tests in binding.tests.items() if "#" not in each for test in tests}
    return {test for test in shown if not test.startswith(OUT_OF_REACH)}
