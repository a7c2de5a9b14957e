"""Every rule of the lint: broken once, named with its place, and accepted again after the least repair."""

import pytest

from conformance.harness.lint import lint
from conformance.harness.replay import write_specs


def codes_and_keys(tree):
    tree.write()
    write_specs(tree.root)
    return [(finding.code, finding.key) for finding in lint(tree.root, tree.sources)]


SPEC = "specs/lamp/spec.md"
BEGIN = "2020-01-01-begin/specs/lamp/spec.md"
ELECTRIC = "2020-01-02-electric/specs/lamp/spec.md"
LIGHT = "lamp/a-lamp-gives-light"

BROKEN = {
    "purpose-thin": (
        "What a lamp promises to whoever switches it on, told in as few words as possible.",
        "Lamps.",
        f"{SPEC}:1",
    ),
    "requirement-header": ("### Requirement: A lamp gives light", "###  Requirement: A lamp gives light", f"{SPEC}:8"),
    "scenario-header": ("#### Scenario: Switched on", "#### Switched on", f"{SPEC}:12"),
    "verb-count": ("A lamp SHOULD NOT hum.\n", "A lamp SHOULD NOT hum.\nA lamp is a fine thing.\n", f"{SPEC}:11"),
    "verb-count of two": ("while it is switched on.\n", "and MUST NOT hum.\n", f"{SPEC}:9"),
    "sentence-form": ("A lamp SHOULD NOT hum.\n", "A lamp SHOULD NOT hum\n", f"{SPEC}:10"),
    "sentence-form of two": ("A lamp SHOULD NOT hum.\n", "A lamp SHOULD NOT hum. It is quiet.\n", f"{SPEC}:10"),
    "sentence-repeated": ("A lamp SHOULD NOT hum.\n", "A lamp SHOULD NOT hum.\nA lamp SHOULD NOT hum.\n", f"{SPEC}:10"),
    "verb-in-lower-case": ("while it is switched on.\n", "while it should be on.\n", f"{SPEC}:9"),
    "step-form": ("- **GIVEN** a lamp that is off", "- GIVEN a lamp that is off", f"{SPEC}:13"),
    "step-order": ("- **THEN** there is light", "- **AND** there is light", f"{SPEC}:12"),
    "step-demands": ("- **THEN** there is light", "- **THEN** there MUST be light", f"{SPEC}:15"),
    "markdown-ambiguous": ("A lamp SHOULD NOT hum.\n", "A lamp SHOULD NOT hum.\n  ## Notes\n", f"{SPEC}:11"),
    "removal-without-reason": ("**Reason**: Lamps", "Lamps", f"{ELECTRIC}:3"),
    "removal-without-migration": ("**Migration**: Use", "Use", f"{ELECTRIC}:3"),
    "removal-as-bullet": (
        "### Requirement: A lamp burns oil\n**R",
        "- `### Requirement: A lamp burns oil`\n**R",
        ELECTRIC,
    ),
    "requirement-orphaned": (
        "## REMOVED Requirements\n",
        "## Notes\n\n### Requirement: A lamp is cheap\nA lamp MUST be cheap.\n\n## REMOVED Requirements\n",
        f"{ELECTRIC}:3",
    ),
    "clause-stale": ("says: A lamp SHOULD NOT hum.,", "says: A lamp SHOULD NOT sing.,", f"{LIGHT}#2"),
    "clause-untraced": ("A lamp SHOULD NOT hum.\n", "A lamp SHOULD NOT hum.\nA lamp MAY blink.\n", f"{SPEC}:11"),
    "clause-number": (f"{LIGHT}#2:", f"{LIGHT}:", LIGHT),
    "clause-number-reused": ("retired: []", f'retired: ["{LIGHT}#2"]', f"{LIGHT}#2"),
    "clause-without-source": ('from: ["000:1", "ruling:light"]', "from: []", f"{LIGHT}#1"),
    "source-unknown seed": ('from: ["000:1"', 'from: ["001:1"', f"{LIGHT}#1"),
    "source-unknown ruling": ('from: ["ruling:humming"]', 'from: ["ruling:singing"]', f"{LIGHT}#2"),
    "source-unknown order": ('"000:7-9"', '"000:9-7"', "humming"),
    "source-unknown line": ('lines: ["000:4-6"]', 'lines: ["000:0-6"]', "excluded[0]"),
    "ruling-unused": ("decisions: {light:", "decisions: {cold: It stays cold., light:", "cold"),
    "ruling-repeated": ("decisions: {light:", "decisions: {humming: No., light:", "humming"),
    "contradiction-form": ("    question: May a lamp hum?\n", "", "humming"),
    "removal-untraced": ("removed:\n  lamp/a-lamp-burns-oil: {", "removed:\n  lamp/x: {", "lamp/a-lamp-burns-oil"),
    "removal-unknown": (
        "retired: []",
        "  lamp/a-lamp-gives-light: {added: [], removed: []}\nretired: []",
        LIGHT,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named_with_its_place(tree, name):
    old, new, key = BROKEN[name]
    tree.replace(old, new)
    assert (name.split()[0], key) in codes_and_keys(tree)


def test_the_unbroken_tree_is_accepted(tree):
    assert codes_and_keys(tree) == []


def test_a_requirement_without_scenario_is_named(tree):
    steps = tree.deltas["2020-01-01-begin"].partition("#### Scenario: Switched on")[2].partition("### Req")[0]
    tree.replace(f"#### Scenario: Switched on{steps}", "")
    assert ("scenario-missing", f"{SPEC}:8") in codes_and_keys(tree)


def test_a_scenario_without_steps_is_named(tree):
    steps = tree.deltas["2020-01-01-begin"].partition("Switched on\n")[2].partition("\n### Req")[0]
    tree.replace(steps, "")
    assert ("scenario-empty", f"{SPEC}:12") in codes_and_keys(tree)


def test_a_requirement_that_demands_nothing_is_named(tree):
    tree.replace("A lamp MUST give light while it is switched on.\nA lamp SHOULD NOT hum.\n", "")
    assert ("clause-missing", f"{SPEC}:8") in codes_and_keys(tree)


def test_two_scenarios_of_one_name_are_named(tree):
    tree.replace(
        "- **AND** nothing hums\n", "- **AND** nothing hums\n\n#### Scenario: Switched on\n- **WHEN** x\n- **THEN** y\n"
    )
    assert ("scenario-repeated", f"{SPEC}:18") in codes_and_keys(tree)


def test_two_names_with_one_id_are_named(tree):
    tree.replace(
        "## REMOVED Requirements\n",
        "## ADDED Requirements\n\n### Requirement: A lamp: gives light!\nA lamp MUST glow.\n\n#### Scenario: Glow\n"
        "- **WHEN** it is dark\n- **THEN** it glows\n\n## REMOVED Requirements\n",
    )
    assert ("id-repeated", f"{SPEC}:18") in codes_and_keys(tree)


def test_a_verb_in_code_is_no_verb(tree):
    tree.replace("while it is switched on.\n", "while `MUST. be` is on.\n")
    tree.replace("while it is switched on., from", "while `MUST. be` is on., from")
    assert codes_and_keys(tree) == []


def test_a_fence_that_hides_a_requirement_is_named(tree):
    tree.replace("- **AND** nothing hums\n", "- **AND** nothing hums\n  ```\n")
    assert "markdown-ambiguous" in {code for code, _ in codes_and_keys(tree)}


def test_the_demand_of_an_archived_delta_is_linted_with_its_own_line(tree):
    tree.replace("A lamp SHOULD NOT hum.\n", "A lamp SHOULD NOT hum\n")
    assert ("sentence-form", f"{BEGIN}:8") in codes_and_keys(tree)
