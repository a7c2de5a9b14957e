"""The fault bank: every fault is noticed, the ledger is fresh, and each gate that says so can fail."""

import copy
import json
import sys
from pathlib import Path

import pytest

from conformance.harness.binding.binding import bind
from conformance.harness.binding.claim import Claims, read_claims
from conformance.harness.catalogue import load_catalogue
from conformance.harness.faults.bank import BANK
from conformance.harness.faults.fault import Fault, SeamGone
from conformance.harness.faults.ledger import check_ledger, faults_by_test, judged_tests, load_ledger
from conformance.harness.faults.rests import Ran, digests_of, pieces_of, read_rests, write_rests
from conformance.harness.faults.subject import SUBJECTS, change_for, hollow
from conformance.launch.forked import run_to_end

LEAST_FAULTS = 60
ROOT = Path(__file__).parents[2]
VERDICTS = """
import json, os, sys
from pathlib import Path
from dataclasses import replace
for name in [name for name in sys.modules if name.partition(".")[0] in ("rollmatch", "conformance")]:
    del sys.modules[name]  # a trial changes what is not loaded yet
from conformance.harness.faults.bank import BANK
from conformance.harness.faults.preload import preload
from conformance.harness.faults.trial import Trial
from conformance.harness.faults.workers import Workers

preload(heavy=False)
folder, test, changes = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
faults = [replace(BANK["group-ports-sorted"], fault_id=name, old=old, new=new) for name, (old, new) in changes.items()]
trials = [Trial(name=fault.fault_id, tests=[test], change_of=fault.change_of, fault=fault) for fault in faults]
workers = Workers(trials, folder, num_workers=1)
verdicts = {tried.trial.name: tried.answer.outcomes[test].verdict for tried in workers.try_all()}
print(json.dumps([verdicts, sorted(workers.refused)]), flush=True)
os._exit(0)
"""
PORT = "        told = server.group_port\n"
RECORD = "@dataclass(frozen=True, slots=True, kw_only=True)"
LAST = "group_port=port) for url, port in pairs)"
CHANGES = {
    "fault": (PORT, PORT + "        told = sorted(told)\n"),
    "nothing": (PORT, PORT + "        pass\n"),
    "error": (PORT, PORT + "        server.no_such_name\n"),
    "unreadable": (PORT, PORT + "        (\n"),
    "fault around functions": (LAST, LAST + "\n\n\npair_servers = lambda server: ()\n"),
    "nothing around functions": (RECORD, RECORD.replace(", slots=True", "")),
}
"""Of the module that pairs servers with ports: what stands there, and what in its place."""


@pytest.fixture(scope="module")
def world():
    claims = read_claims()
    return load_ledger(), claims, bind(claims, load_catalogue()), BANK


def codes(world, *, ledger=None, bank=None, claims=None):
    old_ledger, old_claims, binding, old_bank = world
    told = check_ledger(ledger or old_ledger, claims or old_claims, binding, bank or old_bank)
    return {finding.code for finding in told}


def test_every_fault_is_noticed_and_the_ledger_is_fresh(world):
    assert [str(finding) for finding in check_ledger(*world)] == []
    assert len(BANK) >= LEAST_FAULTS


def test_nothing_passes_on_a_subject_that_does_nothing_or_always_raises(world):
    ledger, _, binding, _ = world
    for subject in SUBJECTS:
        assert ledger["subjects"][subject]["passed"] == []
        assert set(ledger["subjects"][subject]["tests"]) >= judged_tests(binding)


def test_every_fault_says_what_is_wrong_and_changes_something():
    for fault in BANK.values():
        source = fault.path.read_text(encoding="utf-8")
        assert len(fault.what.split()) >= 3
        assert fault.what.endswith(".")
        compile(fault.apply(source), fault.fault_id, "exec")
        assert fault.apply(source) != source


def test_a_stale_ledger_is_found(world):
    for change, code in (
        (lambda ledger: ledger["faults"].pop("first-fit"), "fault-not-tried"),
        (lambda ledger: ledger["faults"]["first-fit"].update(digest="0"), "fault-not-tried"),
        (lambda ledger: ledger["faults"]["first-fit"]["tests"].clear(), "fault-unnoticed"),
        (lambda ledger: next(iter(ledger["faults"]["first-fit"]["tests"].values())).update(digest="0"), "kill-stale"),
        (lambda ledger: ledger["faults"].update(unheard={"digest": "", "tests": {}}), "ledger-row-unknown"),
        (lambda ledger: ledger["subjects"]["do-nothing"]["passed"].append("t.py::test_x"), "passes-on-nothing"),
        (lambda ledger: ledger["subjects"].pop("always-raising"), "subject-not-tried"),
        (lambda ledger: ledger["faults"].clear(), "scenario-vacuous"),
    ):
        spoiled = copy.deepcopy(dict(world[0]))
        change(spoiled)
        assert code in codes(world, ledger=spoiled)


def test_an_unclaimed_fault_and_a_lost_seam_are_found(world):
    lost = Fault(fault_id="lost", what="Nothing stands there.", seam="learn.pack", old="no such text", new="")
    assert {"fault-unclaimed", "fault-seam-gone", "fault-not-tried"} <= codes(world, bank={**BANK, "lost": lost})
    with pytest.raises(SeamGone):
        lost.apply(lost.path.read_text())
    nobody = Claims(found=(), findings=())
    assert "fault-unclaimed" in codes(world, claims=nobody)


def test_kills_are_told_by_test(world):
    killing = faults_by_test(world[0])
    assert "first-fit" in killing["conformance/scenarios/test_packing.py::test_a_gap_is_filled_exactly"]


def test_a_hollow_module_keeps_its_names():
    source = "class A:\n    def f(self):\n        return 1\n    def _g(self):\n        return 2\n"
    space = {}
    exec(hollow(source, "return None"), space)
    assert (space["A"]().f(), space["A"]()._g()) == (None, 2)
    assert change_for("do-nothing", "rollmatch.errors") is None
    assert change_for("do-nothing", "rollmatch.learn.pack") is not None


def test_only_an_assertion_notices_and_nothing_but_functions_is_changed_in_place(tmp_path):
    test = "conformance/scenarios/test_server_connection.py::test_lists_of_one_length_are_paired"
    command = [sys.executable, "-c", VERDICTS, str(tmp_path), test, json.dumps(CHANGES)]
    code, told = run_to_end(command, tmp_path / "log")
    assert code == 0, told
    verdicts, apart = json.loads(told.splitlines()[-1])
    assert verdicts == {
        "fault": "killed",
        "nothing": "passed",
        "error": "crashed",
        "unreadable": "crashed",
        "fault around functions": "killed",
        "nothing around functions": "passed",
    }
    assert apart == ["fault around functions", "nothing around functions"]


SOURCE = """import os

LIMIT = 3


def one(x):
    return x + LIMIT


class Two:
    def method(self):
        return [x for x in range(LIMIT)]
"""


@pytest.mark.parametrize(
    ("old", "new", "num_gone"),
    [
        ("import os\n", "import os\nimport sys\n", 0),
        ("    return x + LIMIT", '    """Told."""\n    # Why.\n\n    return x + LIMIT', 0),
        ("LIMIT = 3\n", "LIMIT = 4\n", 1),
        ("x + LIMIT", "x - LIMIT", 1),
        ("def one(x)", "@cache\ndef one(x)", 1),
        ("for x in range", "for y in range", 1),
        ("class Two:", "class Two(int):", 1),
    ],
)
def test_a_piece_is_known_by_what_it_says_and_not_by_where_it_stands(old, new, num_gone):
    before, after = ({piece.digest for piece in pieces_of(text)} for text in (SOURCE, SOURCE.replace(old, new)))
    assert len(before) == 3
    assert len(before - after) == num_gone


def test_what_ran_is_told_by_its_pieces_and_what_did_not_run_is_not():
    from conformance.harness import slots

    path = Path(slots.__file__)
    ran = Ran()
    ran.watch()
    bind(Claims(found=(), findings=()), load_catalogue())
    ran.stop()
    told = set(digests_of(ran.lines()))
    source = (ROOT / "conformance/harness/binding/binding.py").read_text()
    assert {piece.digest for piece in pieces_of(source)} & told
    assert not {piece.digest for piece in pieces_of(path.read_text())} & told
    assert {piece.digest for piece in pieces_of(path.read_text())} <= set(digests_of(ran.lines(), changed=path))


def test_every_fault_tells_what_its_verdict_rests_on(tmp_path):
    rests = read_rests()
    assert rests.keys() == BANK.keys()
    assert all(rests.values())
    write_rests(rests, tmp_path / "rests.txt")
    assert read_rests(tmp_path / "rests.txt") == rests
