"""Specification and tests belong together; each check that says so can fail."""

import subprocess
import sys

import pytest

from conformance.tools.binding import ROOT, map_tests, read_claims, unknown
from conformance.tools.evidence import Evidence
from conformance.tools.plugin import explain
from conformance.tools.specification import read_specification

UNPROVABLE = {
    "configuration/all-problems-of-a-config-are-reported-at-once#3": "what a check does not load leaves no trace",
    "decoding/effective-decoding-can-be-audited#1": "a permission",
    "rollout-backends/a-rollout-carries-exact-token-ids#7": "a permission",
    "samples/an-object-has-a-description-and-exactly-one-shape#6": "a definition",
}
"""Sentences that no test can show, and why."""
SPEC = """# box Specification

## Requirements

### Requirement: A lid
A lid MUST open.
It has a `MUST` in code only.
A lid SHOULD NOT squeak.

#### Scenario: It opens
- **WHEN** the lid is lifted
- **THEN** it opens
"""
SCENARIO, CLAUSE = "box/it-opens", "box/a-lid#1"
BOTH = f'scenario("{SCENARIO}", clauses=["box/a-lid#1,2"])'


def check_binding(claims, specification, unprovable):
    """What is wrong, one line each; ``unprovable``: clause -> why no test can show it."""
    tests, rules = map_tests(claims), {**specification.scenarios, **specification.clauses}
    problems = [
        f"{claim.test.partition('::')[0]}:{claim.line}: {unknown(claim.rule_id, specification)}"
        for claim in claims
        if claim.rule_id not in rules
    ]
    problems += [
        f"{rule.place}: no test shows {rule_id}; name it in a @pytest.mark.scenario"
        for rule_id, rule in rules.items()
        if rule_id not in tests and rule_id not in unprovable
    ]
    problems += [f"{each}: exempt from a test, but there is no such clause" for each in unprovable if each not in rules]
    problems += [f"{each}: exempt from a test, but {tests[each][0]} shows it" for each in unprovable if each in tests]
    return problems


def test_every_rule_has_a_test_and_every_marker_a_rule():
    assert check_binding(read_claims(), read_specification(), UNPROVABLE) == []


def test_scenarios_are_shown_where_a_reader_looks_for_them():
    scenarios = read_specification().scenarios
    wrong = [claim.test for claim in read_claims() if claim.rule_id in scenarios and "/unit/" in f"/{claim.test}"]
    assert wrong == [], "a file with a test that a scenario names lies in that capability's folder of scenarios/"


def test_no_scenario_was_lost():
    assert len(read_specification().scenarios) >= 347
    assert len(read_specification().clauses) >= 514


@pytest.fixture
def box(tmp_path):
    (tmp_path / "box").mkdir()
    (tmp_path / "box/spec.md").write_text(SPEC)
    return read_specification(tmp_path)


def claims_in(folder, *markers):
    marks = "".join(f"@pytest.mark.{each}\n" for each in markers)
    (folder / "test_lid.py").write_text(f"import pytest\n\n\n{marks}def test_lid():\n    pass\n")
    return read_claims(folder, folder)


def test_a_specification_is_read_with_ids_texts_and_places(box):
    assert list(box.scenarios) == [SCENARIO]
    assert list(box.clauses) == [CLAUSE, "box/a-lid#2"]
    assert box.scenarios[SCENARIO].text == "WHEN the lid is lifted\nTHEN it opens"
    assert box.clauses[CLAUSE].text == "A lid MUST open."
    assert box.clauses["box/a-lid#2"].place.endswith("box/spec.md:8")


def test_an_id_that_occurs_twice_is_refused(tmp_path):
    (tmp_path / "box").mkdir()
    (tmp_path / "box/spec.md").write_text(SPEC + "\n#### Scenario: It  opens\n- **WHEN** x\n- **THEN** y\n")
    with pytest.raises(ValueError, match="the same id"):
        read_specification(tmp_path)


def test_a_bound_specification_is_fine(tmp_path, box):
    assert check_binding(claims_in(tmp_path, BOTH), box, {}) == []
    claims = claims_in(tmp_path, f'scenario("{SCENARIO}")', 'scenario(clauses=["box/a-lid#1"])')
    assert check_binding(claims, box, {"box/a-lid#2": "a wish"}) == []


@pytest.mark.parametrize(
    ("markers", "exempt", "problem"),
    [
        ([f'scenario("{SCENARIO}")'], {}, "no test shows box/a-lid#1;"),
        (['scenario(clauses=["box/a-lid#1,2"])'], {}, f"no test shows {SCENARIO};"),
        ([BOTH, 'scenario("box/it-open")'], {}, f"'box/it-open' is not in the specification; did you mean {SCENARIO}?"),
        ([BOTH, 'scenario(clauses=["box/a-lid#3"])'], {}, "'box/a-lid#3' is not in the specification"),
        ([BOTH], {"box/a-lid#7": "gone"}, "box/a-lid#7: exempt from a test, but there is no such clause"),
        ([BOTH], {CLAUSE: "shown"}, f"{CLAUSE}: exempt from a test, but test_lid.py::test_lid shows it"),
    ],
)
def test_a_broken_binding_is_found(tmp_path, box, markers, exempt, problem):
    (found,) = check_binding(claims_in(tmp_path, *markers), box, exempt)[:1]
    assert problem in found


def test_a_marker_that_is_not_above_a_test_is_refused(tmp_path):
    (tmp_path / "test_lid.py").write_text('import pytest\nMARK = pytest.mark.scenario("box/it-opens")\n')
    with pytest.raises(ValueError, match="not above a test function"):
        read_claims(tmp_path, tmp_path)


def report(outcome, when="call", test="t.py::test_lid"):
    flags = {"failed": outcome == "failed", "skipped": outcome == "skipped", "when": when, "duration": 0.1}
    return type("Report", (), {"user_properties": [("scenario", SCENARIO)], "nodeid": test, **flags})


def test_a_skip_is_no_evidence():
    evidence = Evidence()
    evidence.pytest_runtest_logreport(report("passed", when="setup"))
    evidence.pytest_runtest_logreport(report("skipped"))
    assert evidence.not_shown() == [f"{SCENARIO}: not shown, its tests were skipped: t.py::test_lid"]
    evidence.pytest_runtest_logreport(report("passed", test="t.py::test_other"))
    assert (evidence.not_shown(), evidence.verdicts()) == ([], {SCENARIO: "passed"})
    evidence.pytest_runtest_logreport(report("failed", when="teardown", test="t.py::test_other"))
    assert evidence.verdicts() == {SCENARIO: "failed"}


def test_a_failure_quotes_the_rule_and_a_command():
    text = explain(["packing/a-gap-is-filled-exactly", "packing/a-segment-is-never-split#1"], "t.py::test_lid[a b]")
    assert "spec/openspec/specs/packing/spec.md:" in text
    assert "THEN it holds the segments 0, 2 and 3" in text
    assert " MUST " in text
    assert "python -m pytest 't.py::test_lid[a b]'" in text


BODIES = {
    "unknown": ("packing/no-such-thing", "pass"),
    "skipped": ("packing/a-gap-is-filled-exactly", "pytest.skip('no time')"),
    "broken": ("packing/a-gap-is-filled-exactly", "assert 1 == 2"),
}


def run_with(folder, *options):
    """A run of pytest with the plugin alone over one file with three tests; its output."""
    tests = (
        f'@pytest.mark.scenario("{rule}")\ndef test_{name}():\n    {body}\n' for name, (rule, body) in BODIES.items()
    )
    (folder / "test_one.py").write_text("import pytest\n\n" + "\n\n".join(tests))
    command = [sys.executable, "-m", "pytest", "test_one.py", "-p", "conformance.tools.plugin", *options]
    environment = {"PYTHONPATH": f"{ROOT / 'impl'}:{ROOT}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_an_unknown_rule_fails_and_a_failure_is_explained(tmp_path, options):
    status, text = run_with(tmp_path, "-k", "unknown or broken", *options)
    assert status == 1, text
    assert "'packing/no-such-thing' is not in the specification" in text
    assert "again:  python -m pytest test_one.py::test_broken" in text
    total = len(read_specification().scenarios)
    assert f"scenarios: 0 passed, 2 failed, 0 not-shown, {total - 1} not run of {total}" in text


def test_a_run_that_skips_a_scenario_fails(tmp_path):
    status, text = run_with(tmp_path, "-k", "skipped")
    assert (status, "not shown, its tests were skipped" in text) == (1, True), text
