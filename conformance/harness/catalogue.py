"""Everything that a test can be bound to, by id: requirements, scenarios and clauses of the current specifications.

``load_catalogue()`` reads it all, in the order of the files: ``.requirements``, ``.scenarios`` and ``.clauses`` are
mappings of an id to its ``Entry``. ``python -m conformance.harness.catalogue`` prints one line for each.
"""

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.harness.replay import OPENSPEC, spec_files
from conformance.harness.sources import SOURCES, Sources, load_sources
from conformance.harness.spec_reader import Requirement, Scenario, Spec, Step, read_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing to be shown to hold."""

    entry_id: str
    """``capability/requirement``; for a scenario ``/scenario`` follows, for a clause ``#number``."""
    requirement_id: str
    """Of the requirement that it belongs to, or is."""
    text: str
    """The sentence; of a scenario its steps, of a requirement its name, one a line."""
    path: str
    """Below ``spec/openspec``."""
    line: int
    steps: tuple[Step, ...] = ()
    """Of a scenario: word, text and line of each."""
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
    own = requirement.requirement_id
    return Entry(entry_id=own, requirement_id=own, text=requirement.name, path=spec.path, line=requirement.line)


def _scenario_entry(spec: Spec, scenario: Scenario) -> Entry:
    return Entry(
        entry_id=scenario.scenario_id,
        requirement_id=scenario.scenario_id.rpartition("/")[0],
        text="\n".join(f"{step.word} {step.text}" for step in scenario.steps),
        path=spec.path,
        line=scenario.line,
        steps=scenario.steps,
    )


def _clause_entries(spec: Spec, requirement: Requirement, sources: Sources) -> Iterator[Entry]:
    sentences = {sentence.text: sentence for sentence in requirement.clauses}
    for row in sources.rows:
        sentence = sentences.get(row.says) if row.requirement_id == requirement.requirement_id else None
        if sentence is not None:
            yield Entry(
                entry_id=row.clause_id,
                requirement_id=row.requirement_id,
                text=row.says,
                path=spec.path,
                line=sentence.line,
                verb=sentence.verbs[0],
            )


def main() -> None:
    """Print every entry: kind, place, id."""
    catalogue = load_catalogue()
    kinds = (("requirement", catalogue.requirements), ("scenario", catalogue.scenarios), ("clause", catalogue.clauses))
    for kind, entries in kinds:
        for entry in entries.values():
            sys.stdout.write(f"{kind}\t{entry.path}:{entry.line}\t{entry.entry_id}\n")


if __name__ == "__main__":
    main()
