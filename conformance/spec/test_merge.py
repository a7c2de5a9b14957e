"""Our merge: what it makes of a delta, and what it refuses with which code."""

import re

import pytest
from hypothesis import example, given

from conformance.harness.main_spec import structure_flaws
from conformance.harness.merge import merge
from conformance.harness.spec_error import MergeRefused
from conformance.spec.deltas import edits

BASE = """\
# lamp Specification

## Purpose
Light.

## Requirements

### Requirement: Alpha
A MUST hold.

#### Scenario: one
- **WHEN** a
- **THEN** b

### Requirement: Beta
B MUST hold.

#### Scenario: two
- **WHEN** c
- **THEN** d
"""
ALPHA = "### Requirement: Alpha\nA MUST change.\n\n#### Scenario: one\n- **WHEN** x\n- **THEN** y"


def merged(delta, base=BASE):
    return merge(base, delta, capability="lamp", change="2020-01-01-begin")


def refusal(delta, base=BASE):
    with pytest.raises(MergeRefused) as caught:
        merged(delta, base)
    return caught.value.code, caught.value.key


def test_an_added_requirement_comes_last():
    result = merged("## ADDED Requirements\n\n### Requirement: Gamma\nG MUST hold.\n\n#### Scenario: three\n- x\n")
    assert result == BASE + "\n### Requirement: Gamma\nG MUST hold.\n\n#### Scenario: three\n- x\n"


def test_a_modified_requirement_keeps_its_place():
    result = merged(f"## MODIFIED Requirements\n\n{ALPHA}\n")
    assert result == BASE.replace(
        BASE[BASE.index("### Requirement: Alpha") : BASE.index("\n\n### Requirement: B")], ALPHA
    )


def test_a_removed_requirement_is_gone():
    assert merged("## REMOVED Requirements\n### Requirement: Beta\n") == BASE[: BASE.index("\n### Requirement: Beta")]


def test_a_renamed_requirement_keeps_its_place_and_can_be_modified():
    renames = "## RENAMED Requirements\n- FROM: `### Requirement: Alpha`\n- TO: `### Requirement: Gamma`\n"
    assert merged(renames) == BASE.replace("Requirement: Alpha", "Requirement: Gamma")
    gamma = ALPHA.replace("Alpha", "Gamma")
    both = merged(f"{renames}## MODIFIED Requirements\n{gamma}\n")
    assert both.index("### Requirement: Gamma\nA MUST change.") < both.index("### Requirement: Beta")


def test_a_new_capability_begins_with_its_purpose():
    delta = "## Purpose\nFor light.\n\n## ADDED Requirements\n\n" + ALPHA
    assert merged(delta, base=None) == f"# lamp Specification\n\n## Purpose\nFor light.\n\n## Requirements\n\n{ALPHA}\n"


def test_a_new_capability_without_purpose_gets_the_placeholder():
    assert "## Purpose\nTBD - created by archiving change 2020-01-01-begin." in merged(
        f"## ADDED Requirements\n{ALPHA}", base=None
    )


def test_byte_order_marks_and_carriage_returns_vanish():
    delta = "\ufeff## MODIFIED Requirements\n\n" + ALPHA
    assert merged(delta.replace("\n", "\r\n"), BASE.replace("\n", "\r\n")) == merged(delta)


REFUSED = {
    "delta-empty": ("## ADDED Requirements\n", "lamp"),
    "rename-unpaired": ("## RENAMED Requirements\n- FROM: `### Requirement: Alpha`\n", "Alpha"),
    "rename-unpaired twice": (
        "## RENAMED Requirements\n- FROM: ### Requirement: Alpha\n- FROM: ### Requirement: Beta\n"
        "- TO: ### Requirement: Gamma\n",
        "Alpha",
    ),
    "name-repeated": (f"## MODIFIED Requirements\n{ALPHA}\n{ALPHA}\n", "Alpha"),
    "sections-contradict": (
        f"## MODIFIED Requirements\n{ALPHA}\n## REMOVED Requirements\n### Requirement: Alpha\n",
        "Alpha",
    ),
    "sections-contradict folded": (
        "## RENAMED Requirements\n- FROM: ### Requirement: Alpha\n- TO: ### Requirement: Gamma\n"
        "## REMOVED Requirements\n### Requirement: alpha\n",
        "Alpha",
    ),
    "sections-contradict old name": (
        "## RENAMED Requirements\n- FROM: ### Requirement: Alpha\n- TO: ### Requirement: G\n"
        f"## MODIFIED Requirements\n{ALPHA}\n",
        "Alpha",
    ),
    "name-unknown": (f"## MODIFIED Requirements\n{ALPHA.replace('Alpha', 'Gamma')}\n", "Gamma"),
    "name-unknown in another case": ("## REMOVED Requirements\n### Requirement: beta\n", "beta"),
    "name-unknown to rename": ("## RENAMED Requirements\nFROM: ### Requirement: G\nTO: ### Requirement: H\n", "G"),
    "name-taken": (f"## ADDED Requirements\n{ALPHA}\n", "Alpha"),
    "name-taken in another case": (f"## ADDED Requirements\n{ALPHA.replace('Alpha', 'ALPHA')}\n", "ALPHA"),
    "name-taken by a rename": (
        "## RENAMED Requirements\nFROM: ### Requirement: Alpha\nTO: ### Requirement: Beta\n",
        "Beta",
    ),
    "name-taken by a rename to a name that goes away": (
        "## RENAMED Requirements\nFROM: ### Requirement: Alpha\nTO: ### Requirement: Beta\n"
        "## REMOVED Requirements\n### Requirement: Beta\n",
        "Beta",
    ),
    "scenario-dropped": (f"## MODIFIED Requirements\n{ALPHA.replace('Scenario: one', 'Scenario: other')}\n", "Alpha"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_delta_is_refused(name):
    delta, key = REFUSED[name]
    assert refusal(delta) == (name.split()[0], key)


ACCEPTED = {
    "one modification": f"## MODIFIED Requirements\n{ALPHA}\n",
    "a whole rename": "## RENAMED Requirements\n- FROM: ### Requirement: Alpha\n- TO: ### Requirement: Gamma\n",
    "a removal in the right case": "## REMOVED Requirements\n### Requirement: Beta\n",
    "a removal that was done before": "## REMOVED Requirements\n### Requirement: Never there\n",
    "a rename that was done before": "## RENAMED Requirements\nFROM: ### Requirement: Old\nTO: ### Requirement: Beta\n",
    "an addition under another name": f"## ADDED Requirements\n{ALPHA.replace('Alpha', 'Gamma')}\n",
    "a scenario more": f"## MODIFIED Requirements\n{ALPHA}\n\n#### Scenario: more\n- x\n",
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_repaired_delta_is_accepted(name):
    assert merged(ACCEPTED[name]).startswith("# lamp Specification\n")


def test_nothing_can_be_modified_in_a_new_capability():
    assert refusal(f"## MODIFIED Requirements\n{ALPHA}\n", base=None) == ("capability-missing", "lamp")


@pytest.mark.parametrize(
    "flaw", ["## ADDED Requirements\n", "## Notes\n\n### Requirement: Stray\n", "### Requirement: Beta\n"]
)
def test_a_broken_base_is_refused(flaw):
    assert refusal("## REMOVED Requirements\n### Requirement: Beta\n", BASE + "\n" + flaw) == (
        "capability-broken",
        "lamp",
    )


@pytest.mark.parametrize("purpose", ["Light. <!-- or heat -->", "```\nlight\n```", "### Light"])
def test_an_unclear_purpose_is_refused(purpose):
    delta = f"## Purpose\n{purpose}\n\n## ADDED Requirements\n{ALPHA}\n"
    assert refusal(delta, base=None)[0] == "purpose-unclear"


TWICE = BASE.replace(
    "\n### Requirement: Beta", "\n#### Scenario: one\n- **WHEN** e\n- **THEN** f\n\n### Requirement: Beta"
)
"""A base whose first requirement has two scenarios of one name."""
LOOSE_HEADER = BASE[: BASE.index("\n### Requirement: Beta")].replace("## Requirements", "##  requirements \t")


def test_of_two_scenarios_of_one_name_both_are_kept():
    assert refusal(f"## MODIFIED Requirements\n\n{ALPHA}\n", TWICE) == ("scenario-dropped", "Alpha")
    both = f"{ALPHA}\n\n#### Scenario: one\n- **WHEN** e\n- **THEN** f"
    assert both in merged(f"## MODIFIED Requirements\n\n{both}\n", TWICE)


def test_a_file_without_requirements_ends_in_its_header():
    assert merged("## REMOVED Requirements\n### Requirement: Alpha\n", LOOSE_HEADER).endswith("\n\n##  requirements\n")


def fences_close(text):
    """Whether no block of code runs on into the next requirement, which would then be none."""
    blocks = re.split(r"^###\s*requirement", text, flags=re.MULTILINE | re.IGNORECASE)
    return all(len(re.findall(r"^\s*(?:```|~~~)", block, flags=re.MULTILINE)) % 2 == 0 for block in blocks)


def test_a_block_of_code_that_runs_on_is_seen():
    assert fences_close("### Requirement: A\n```\nx\n```\n### Requirement: B\n")
    assert not fences_close("### Requirement: A\n```\nx\n### Requirement: B\n```\n")


@given(edit=edits())
@example(edit=("\ufeff## Purpose\nLight.\n", "## ADDED Requirements\n\n### Requirement: Alpha\nA MUST hold.\n"))
def test_a_sound_result_ends_in_one_line_feed_and_is_left_alone_by_a_delta_about_something_else(edit):
    base, delta = edit
    try:
        result = merged(delta, base)
    except MergeRefused:
        return
    assert result.endswith("\n")
    assert not result.endswith("\n\n")
    # A base without requirements is taken over as it stands, with carriage returns and byte order mark; what is read
    # again has none.
    if not {"\r", "\ufeff"} & set(result) and not structure_flaws(result) and fences_close(result):
        untouched = "## REMOVED Requirements\n### Requirement: Nobody has this name\n"
        assert merged(untouched, result) == result
