"""The specification and the tests hold together; and each gate that says so can fail."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.harness.binding.binding import bind, check_binding
from conformance.harness.binding.claim import ROOT, Claims, read_claims
from conformance.harness.binding.evidence import Evidence
from conformance.harness.binding.explanation import explain
from conformance.harness.binding.register import Register, load_register, write_acknowledged
from conformance.harness.catalogue import Catalogue, Entry, load_catalogue
from conformance.harness.sources import load_sources
from conformance.launch.forked import run_to_end, this_run

MOST_PENDING = (0, 0)
"""Scenarios and clauses that may be pending. Only ever lowered."""
SCENARIO, CLAUSE = "box/a-lid/it-opens", "box/a-lid#1"


@pytest.fixture(scope="module")
def catalogue():
    return load_catalogue()


@pytest.fixture(scope="module")
def claims():
    return read_claims()


def test_every_rule_is_bound_pending_or_excluded_and_read(catalogue, claims):
    found = check_binding(bind(claims, catalogue), catalogue, load_register())
    assert [str(finding) for finding in found] == []


def test_the_list_of_what_is_pending_only_shrinks(catalogue):
    pending = load_register().pending
    counts = tuple(len(pending.keys() & entries.keys()) for entries in (catalogue.scenarios, catalogue.clauses))
    assert all(count <= most for count, most in zip(counts, MOST_PENDING, strict=True))
    assert counts == MOST_PENDING, "less is pending: lower MOST_PENDING to these numbers"


def test_every_removed_requirement_has_a_tombstone(claims):
    assert {claim.text for claim in claims.of("tombstone")} == set(load_sources().removed)


def small(text="it opens."):
    entry = Entry(
        entry_id=SCENARIO, text=f"WHEN x\nTHEN {text}", path="specs/box/spec.md", line=9, requirement_id="box/a-lid"
    )
    clause = Entry(
        entry_id=CLAUSE,
        text="A lid MUST open.",
        path="specs/box/spec.md",
        line=4,
        verb="MUST",
        requirement_id="box/a-lid",
    )
    return Catalogue(requirements={}, scenarios={SCENARIO: entry}, clauses={CLAUSE: clause})


def claims_in(folder, *decorators, body="assert True"):
    marks = "".join(f"@pytest.mark.{each}\n" for each in decorators)
    (folder / "test_lid.py").write_text(f"import pytest\n\n\n{marks}def test_lid():\n    {body}\n")
    return read_claims(folder, folder)


def codes(claims, catalogue, **register):
    listed = {"pending": {}, "excluded": {}, "acknowledged": {}}
    return {f.code for f in check_binding(bind(claims, catalogue), catalogue, Register(**(listed | register)))}


BOTH = (f'scenario("{SCENARIO}")', f'clause("{CLAUSE}")')


def read_of(catalogue):
    return {each: entry.digest for each, entry in {**catalogue.scenarios, **catalogue.clauses}.items()}


def test_a_bound_and_read_specification_is_fine(tmp_path):
    assert codes(claims_in(tmp_path, *BOTH), small(), acknowledged=read_of(small())) == set()
    short = claims_in(tmp_path, 'scenario("box/it-opens")', BOTH[1])
    assert codes(short, small(), acknowledged=read_of(small())) == set()


@pytest.mark.parametrize(
    ("decorators", "code"),
    [
        (BOTH[:1], "clause-unbound"),
        (BOTH[1:], "scenario-unbound"),
        ((*BOTH, 'scenario("box/it-closes")'), "scenario-unknown"),
        ((*BOTH, 'clause("box/a-lid#2")'), "clause-unknown"),
        ((*BOTH, "scenario(SOME_NAME)"), "marker-unreadable"),
        ((*BOTH, "scenario"), "marker-unreadable"),
    ],
)
def test_a_broken_binding_is_found(tmp_path, decorators, code):
    assert code in codes(claims_in(tmp_path, *decorators), small(), acknowledged=read_of(small()))


def test_text_that_has_changed_is_stale_until_it_is_read_again(tmp_path):
    bound, old, new = claims_in(tmp_path, *BOTH), small(), small("it opens twice.")
    assert codes(bound, new, acknowledged=read_of(old)) == {"text-not-acknowledged"}
    assert codes(bound, new, acknowledged=read_of(new)) == set()
    spaced = {SCENARIO: replace(old.scenarios[SCENARIO], text="WHEN x  \nTHEN   it opens.")}
    assert codes(bound, replace(old, scenarios=spaced), acknowledged=read_of(old)) == set()


@pytest.mark.parametrize(
    ("register", "code"),
    [
        ({"pending": {SCENARIO: "the next issue"}}, "pending-bound"),
        ({"pending": {"box/a-lid/gone": "the next issue"}}, "pending-unknown"),
        ({"excluded": {CLAUSE: "no test can"}}, "excluded-bound"),
        ({"excluded": {"box/a-lid#7": "no test can"}}, "excluded-unknown"),
        ({"acknowledged": {**read_of(small()), "box/a-lid#7": "0"}}, "acknowledged-unbound"),
    ],
)
def test_a_list_that_has_outlived_its_reason_is_found(tmp_path, register, code):
    told = {"acknowledged": read_of(small())} | register
    assert code in codes(claims_in(tmp_path, *BOTH), small(), **told)


def test_pending_and_excluded_need_a_reason(tmp_path):
    nobody = Claims(found=(), findings=())
    listed = {"pending": {SCENARIO: "the next issue"}, "excluded": {CLAUSE: "no test can"}}
    assert codes(nobody, small(), **listed, acknowledged={CLAUSE: read_of(small())[CLAUSE]}) == set()
    assert "excluded-without-reason" in codes(nobody, small(), **(listed | {"excluded": {CLAUSE: ""}}))
    assert "excluded-scenario" in codes(nobody, small(), excluded={SCENARIO: "no test can", CLAUSE: "no test can"})


def test_what_was_read_is_read_back_though_a_digest_looks_like_a_number(tmp_path):
    told = {"box/a-lid#1": "264030e89081", "box/a-lid#2": "123456789012", SCENARIO: "abcdefabcdef"}
    write_acknowledged(told, tmp_path)
    (tmp_path / "pending.yaml").write_text("{}\n")
    assert load_register(tmp_path).acknowledged == told


def report(outcome, when="call", test="t.py::test_lid"):
    flags = {"failed": outcome == "failed", "skipped": outcome == "skipped", "when": when, "duration": 0.1}
    return type("Report", (), {"user_properties": [("scenario", SCENARIO)], "nodeid": test, **flags})


def test_a_skip_is_no_evidence():
    evidence = Evidence()
    evidence.take(report("passed", when="setup"))
    evidence.take(report("skipped"))
    assert [finding.code for finding in evidence.findings()] == ["scenario-not-shown"]
    evidence.take(report("passed", test="t.py::test_other"))
    assert (evidence.findings(), evidence.verdicts()) == ([], {SCENARIO: "passed"})
    evidence.take(report("failed", when="teardown", test="t.py::test_other"))
    assert evidence.verdicts() == {SCENARIO: "failed"}


def test_a_failure_quotes_file_line_sentence_and_a_command():
    told = explain([SCENARIO, CLAUSE], "t.py::test_lid[a b]", small())
    assert "spec/openspec/specs/box/spec.md:9" in told
    assert "THEN it opens." in told
    assert "A lid MUST open." in told
    assert "python -m pytest 't.py::test_lid[a b]'" in told


STRANGE = 'import pytest\n\n\n@pytest.mark.scenario("packing/no-such-thing")\ndef test_strange():\n    pass\n'
SKIPPED = """import pytest


@pytest.mark.scenario("packing/a-gap-is-filled-exactly")
def test_skipped():
    pytest.skip("no time")
"""
BROKEN = """import pytest


@pytest.mark.scenario("packing/a-gap-is-filled-exactly")
def test_broken():
    assert 1 == 2
"""


def run_with(text, folder, *options):
    """A run of pytest with the plugin over one test file; its exit status and what it said."""
    path = folder / "test_one.py"
    path.write_text(text)
    code = (
        f"import os, sys, pytest\nfrom pathlib import Path\nos.chdir({str(folder)!r})\n"
        "from conformance.harness.binding import plugin\nfrom conformance.harness.binding.claim import read_claims\n"
        f"plugin.read_claims = lambda: read_claims(Path({str(folder)!r}), Path({str(folder)!r}))\n"
        f"sys.exit(pytest.main([{str(path)!r}, '-p', plugin.__name__, '-p', 'no:cacheprovider', *{list(options)!r},"
        f" '-p', 'conformance.workers', '--testrunuid', {this_run()!r}]))"
    )
    environment = {"PYTHONPATH": f"{ROOT / 'impl'}:{ROOT}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return run_to_end([sys.executable, "-c", code], folder / "log", environment=environment)


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_an_unknown_id_stops_a_run_before_it_starts(tmp_path, options):
    status, told = run_with(STRANGE, tmp_path, *options)
    assert status == 4, told
    assert "[scenario-unknown] test_one.py:5: 'packing/no-such-thing' is no scenario." in told
    assert "INTERNALERROR" not in told


def test_a_skipped_scenario_fails_the_run_and_a_failing_one_is_explained(tmp_path):
    status, told = run_with(SKIPPED, tmp_path)
    assert (status, "[scenario-not-shown] packing/" in told) == (1, True), told
    status, told = run_with(BROKEN, tmp_path, "-n", "1")
    assert status == 1
    assert "spec/openspec/specs/packing/spec.md:" in told
    assert "THEN it holds the segments 0, 2 and 3" in told
    assert "again:  python -m pytest test_one.py::test_broken" in told


def test_markers_are_read_where_they_stand(tmp_path):
    found = claims_in(tmp_path, *BOTH).found
    assert [(claim.kind, claim.text, claim.test) for claim in found] == [
        ("scenario", SCENARIO, "test_lid.py::test_lid"),
        ("clause", CLAUSE, "test_lid.py::test_lid"),
    ]
    other = claims_in(tmp_path, *BOTH, body="assert False").found
    assert {claim.digest for claim in found} != {claim.digest for claim in other}
    assert Path(ROOT / "conformance").is_dir()
