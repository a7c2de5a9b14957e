"""The committed specification keeps OpenSpec's rules, by the tool itself, and the few that make it executable."""

import json
import re
import shutil

import pytest

from conformance.tools.openspec_tool import call, installed
from conformance.tools.specification import CODE, SPECS, VERB, read_specification

VALIDATE = ("validate", "--all", "--strict", "--json", "--no-interactive")
ORDER = re.compile(r"(GIVEN (AND )*)?WHEN (AND )*THEN (AND )*")


@pytest.fixture
def tree(tmp_path):
    """A copy that the tool may write to; it looks for ``openspec/`` below its folder."""
    shutil.copytree(SPECS.parent, tmp_path / "openspec")
    return tmp_path


def judged(folder):
    done = call(VALIDATE, cwd=folder)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.openspec
def test_the_committed_tree_passes_strict_validation(tree):
    status, report = judged(tree)
    assert status == 0, report
    assert report["summary"]["totals"]["passed"] == len(list(SPECS.glob("*/spec.md")))
    assert {issue["level"] for item in report["items"] for issue in item["issues"]} <= {"INFO"}


@pytest.mark.openspec
def test_strict_validation_can_fail(tree):
    path = tree / "openspec/specs/packing/spec.md"
    path.write_text(path.read_text().replace("## Purpose", "## Aim"))
    assert judged(tree)[0] == 1


@pytest.mark.openspec
def test_a_change_is_archived_into_the_specification(tree):
    delta = tree / "openspec/changes/quiet/specs/packing/spec.md"
    delta.parent.mkdir(parents=True)
    (tree / "openspec/changes/quiet/proposal.md").write_text("# Quiet\n\n## Why\nNoise.\n\n## What Changes\n- Less.\n")
    scenario = "#### Scenario: No word\n- **WHEN** a row is packed\n- **THEN** nothing is printed\n"
    delta.write_text(
        f"## ADDED Requirements\n\n### Requirement: Packing is quiet\nPacking MUST be quiet.\n\n{scenario}"
    )
    done = call(("archive", "quiet", "--yes", "--json"), cwd=tree)
    assert done.returncode == 0, done.stdout
    rules = read_specification(tree / "openspec/specs")
    assert {"packing/no-word"} == rules.scenarios.keys() - read_specification().scenarios.keys()
    assert {"packing/packing-is-quiet#1"} == rules.clauses.keys() - read_specification().clauses.keys()


def test_every_scenario_has_its_steps_in_order():
    for rule in read_specification().scenarios.values():
        words = [line.partition(" ")[0] for line in rule.text.split("\n")]
        assert ORDER.fullmatch("".join(f"{word} " for word in words)), rule.place
        assert not VERB.search(CODE.sub("", rule.text)), f"{rule.place}: a step demands something"


def test_every_clause_is_one_sentence_with_one_verb():
    for rule in read_specification().clauses.values():
        prose = CODE.sub("``", rule.text)
        assert len(VERB.findall(prose)) == 1, rule.place
        assert prose.endswith("."), rule.place
        assert not re.search(r"[.!?]\s+\S|\b(must|shall|should|may)\b", prose), rule.place


def test_a_tool_of_another_version_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLMATCH_CACHE", str(tmp_path))
    folder = tmp_path / "openspec-1.13.2/node_modules/@fission-ai/openspec"
    assert installed() is None
    folder.mkdir(parents=True)
    (folder / "package.json").write_text('{"version": "1.13.1"}')
    assert installed() is None
    (folder / "package.json").write_text('{"version": "1.13.2"}')
    assert installed() == folder
