"""Everything that a test can be bound to, by id: requirements, scenarios and clauses of the current specifications."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.harness.replay import OPENSPEC, spec_files
from conformance.harness.sources import SOURCES, Sources, load_sources
from conformance.harness.spec_reader import Requirement, Scenario, Spec, read_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing to be shown to hold."""

    entry_id: str
    text: str
    """The sentence; of a scenario its steps, of a requirement its name, one a line."""
    path: str
    line: int
    verb: str = ""
    """Of a clause: MUST, MUST NOT, SHOULD, MAY, ..."""

    @property
    def digest(self) -> str:
        """Changes with the text, but not with its spacing; 12 hexadecimal digits."""
        return hashlib.sha256(" ".join(self.text.split()).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """By id. Made by ``load_catalogue``."""

    requirements: Mapping[str, Entry]
    scenarios: Mapping[str, Entry]
    clauses: Mapping[str, Entry]


def load_specs(root: Path = OPENSPEC) -> list[Spec]:
    """All current specifications, by name."""
    return [
        read_spec(path.read_text(encoding="utf-8"), capability=capability, path=f"specs/{capability}/spec.md")
        for capability, path in spec_files(root).items()
    ]


def load_catalogue(root: Path = OPENSPEC, sources: Path = SOURCES) -> Catalogue:
    """Read specifications and sources; what the lint finds wrong is left out here without a word."""
    specs, traced = load_specs(root), load_sources(sources)
    found = [(spec, requirement) for spec in specs for requirement in spec.requirements]
    return Catalogue(
        requirements={r.requirement_id: _requirement_entry(spec, r) for spec, r in found},
        scenarios={s.scenario_id: _scenario_entry(spec, s) for spec, r in found for s in r.scenarios},
        clauses={entry.entry_id: entry for spec, r in found for entry in _clause_entries(spec, r, traced)},
    )


def _requirement_entry(spec: Spec, requirement: Requirement) -> Entry:
    return Entry(entry_id=requirement.requirement_id, text=requirement.name, path=spec.path, line=requirement.line)


def _scenario_entry(spec: Spec, scenario: Scenario) -> Entry:
    text = "\n".join(f"{step.word} {step.text}" for step in scenario.steps)
    return Entry(entry_id=scenario.scenario_id, text=text, path=spec.path, line=scenario.line)


def _clause_entries(spec: Spec, requirement: Requirement, sources: Sources) -> Iterator[Entry]:
    sentences = {sentence.text: sentence for sentence in requirement.clauses}
    for row in sources.rows:
        sentence = sentences.get(row.says) if row.requirement_id == requirement.requirement_id else None
        if sentence is not None:
            verb = sentence.verbs[0]
            yield Entry(entry_id=row.clause_id, text=row.says, path=spec.path, line=sentence.line, verb=verb)
