"""The committed specifications: replayed from nothing, free of findings, and as large as they have to be."""

from conformance.harness.catalogue import load_catalogue
from conformance.harness.lint import lint
from conformance.harness.quick_yaml import parse_own
from conformance.harness.replay import OPENSPEC, replay, replay_findings, spec_files, write_specs
from conformance.harness.sources import SOURCES
from conformance.harness.trace import missing_rows
from rollmatch.config.yaml_dialect import parse_mapping


def test_replaying_all_changes_gives_the_committed_files_byte_for_byte():
    committed = {capability: path.read_bytes() for capability, path in spec_files(OPENSPEC).items()}
    assert {capability: text.encode() for capability, text in replay().items()} == committed


def test_the_lint_finds_nothing():
    assert [str(finding) for finding in lint()] == []


def test_the_catalogue_is_as_large_as_promised():
    catalogue = load_catalogue()
    binding = [entry for entry in catalogue.clauses.values() if entry.verb != "MAY"]
    assert len(catalogue.scenarios) >= 100
    assert len(binding) >= 250


def test_the_change_to_actors_and_learners_adds_modifies_removes_and_renames():
    change = OPENSPEC / "changes" / "archive" / "2026-02-04-async-actor-learner"
    texts = "".join(path.read_text(encoding="utf-8") for path in spec_files(change).values())
    assert all(f"## {word} Requirements" in texts for word in ("ADDED", "MODIFIED", "REMOVED", "RENAMED"))


def test_every_entry_leads_to_its_line():
    catalogue = load_catalogue()
    for entry in (*catalogue.requirements.values(), *catalogue.clauses.values()):
        line = (OPENSPEC / entry.path).read_text(encoding="utf-8").split("\n")[entry.line - 1]
        assert line.removeprefix("### Requirement: ") == entry.text


def test_every_step_leads_to_its_line():
    catalogue = load_catalogue()
    assert all(entry.steps for entry in catalogue.scenarios.values())
    for entry in catalogue.scenarios.values():
        lines = (OPENSPEC / entry.path).read_text(encoding="utf-8").split("\n")
        assert lines[entry.line - 1].startswith("#### Scenario: ")
        assert [lines[step.line - 1] for step in entry.steps] == [f"- **{s.word}** {s.text}" for s in entry.steps]
        assert entry.text == "\n".join(f"{step.word} {step.text}" for step in entry.steps)


def test_every_entry_belongs_to_a_requirement():
    catalogue = load_catalogue()
    entries = (*catalogue.scenarios.values(), *catalogue.clauses.values())
    assert {entry.requirement_id for entry in entries} == set(catalogue.requirements)
    assert all(entry.entry_id.startswith(entry.requirement_id) for entry in entries)


def test_an_edited_specification_is_found(tree):
    tree.write()
    write_specs(tree.root)
    assert replay_findings(tree.root) == []
    path = tree.root / "specs" / "lamp" / "spec.md"
    path.write_bytes(path.read_bytes().replace(b"give light", b"give heat"))
    assert [(each.code, each.key) for each in replay_findings(tree.root)] == [
        ("specs-not-replayed", "specs/lamp/spec.md")
    ]


def test_a_specification_that_no_change_made_is_found(tree):
    tree.write()
    write_specs(tree.root)
    stray = tree.root / "specs" / "candle" / "spec.md"
    stray.parent.mkdir()
    stray.write_bytes(b"# candle\n")
    assert [each.key for each in replay_findings(tree.root)] == ["specs/candle/spec.md"]


def test_rows_are_printed_for_untraced_clauses_only(tree):
    from conformance.harness.catalogue import load_specs
    from conformance.harness.sources import load_sources

    tree.replace("A lamp SHOULD NOT hum.\n", "A lamp SHOULD NOT hum.\nA lamp MAY blink.\n")
    tree.replace("retired: []", "retired: [lamp/a-lamp-gives-light#3]")
    tree.write()
    write_specs(tree.root)
    rows = list(missing_rows(load_specs(tree.root), load_sources(tree.sources)))
    assert rows == ['  lamp/a-lamp-gives-light#4:\n    says: "A lamp MAY blink."\n    from: []\n']


def test_a_digest_follows_the_words_and_not_the_spacing(tree):
    tree.write()
    write_specs(tree.root)
    first = load_catalogue(tree.root, tree.sources)
    tree.replace("- **WHEN** the switch is pressed", "- **WHEN** the  switch is pressed")
    tree.write()
    write_specs(tree.root)
    spaced = load_catalogue(tree.root, tree.sources)
    tree.replace("- **WHEN** the  switch is pressed", "- **WHEN** the switch is touched")
    tree.write()
    write_specs(tree.root)
    touched = load_catalogue(tree.root, tree.sources)
    scenario = "lamp/a-lamp-gives-light/switched-on"
    assert first.scenarios[scenario].digest == spaced.scenarios[scenario].digest
    assert first.scenarios[scenario].digest != touched.scenarios[scenario].digest


def test_a_quick_reader_reads_our_lists_as_rollmatch_would():
    for path in SOURCES.parent.glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        assert parse_own(text, origin="x") == parse_mapping(text, origin="x")
