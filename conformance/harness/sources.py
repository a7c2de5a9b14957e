"""``spec/sources.yaml``: where each clause comes from, and how the sources' contradictions were ruled."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.harness.quick_yaml import parse_own

SOURCES = Path(__file__).parents[2] / "spec" / "sources.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClauseRow:
    """One traced clause; its number never passes to another sentence."""

    clause_id: str
    """``capability/requirement#number``."""
    says: str
    """The whole sentence."""
    origins: tuple[str, ...]
    """``seed:line``, ``seed:first-last`` or ``ruling:name``."""

    @property
    def requirement_id(self) -> str:
        return self.clause_id.partition("#")[0]

    @property
    def number(self) -> int:
        """0 when the id has no number."""
        digits = self.clause_id.partition("#")[2]
        return int(digits) if digits.isdecimal() else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The whole file. Made by ``read_sources``, eaten by the source rules and the catalogue."""

    seeds: Mapping[str, str]
    contradictions: Mapping[str, Any]
    """Name -> question, said (rows of lines and says), ruling."""
    decisions: Mapping[str, str]
    """Name -> what was decided where no seed speaks."""
    removed: Mapping[str, Any]
    """Requirement id -> where it came from (added) and what took it away (removed)."""
    retired: Sequence[str]
    """Clause ids whose sentences are gone."""
    rows: tuple[ClauseRow, ...]
    excluded: Sequence[Any]
    """Lines of seeds that are no rule, with the reason."""

    def references(self) -> Iterator[tuple[str, str]]:
        """(place, reference) of everything that points at a seed or a ruling."""
        for row in self.rows:
            yield from ((row.clause_id, origin) for origin in row.origins)
        for name, contradiction in self.contradictions.items():
            yield from ((name, line) for said in contradiction["said"] for line in said["lines"])
        for requirement_id, ends in self.removed.items():
            yield from ((requirement_id, line) for line in (*ends["added"], *ends["removed"]))
        for index, exclusion in enumerate(self.excluded):
            yield from ((f"excluded[{index}]", line) for line in exclusion["lines"])


def load_sources(path: Path = SOURCES) -> Sources:
    return read_sources(path.read_text(encoding="utf-8"))


def read_sources(text: str) -> Sources:
    """Read the file. Errors: those of ``parse_own`` (one key twice, no YAML), ``KeyError`` for a missing part."""
    tree = parse_own(text, origin="spec/sources.yaml")
    return Sources(
        seeds=tree["seeds"],
        contradictions=tree["contradictions"],
        decisions=tree["decisions"],
        removed=tree["removed"],
        retired=tree["retired"],
        rows=tuple(
            ClauseRow(clause_id=clause_id, says=row["says"], origins=tuple(row["from"]))
            for clause_id, row in tree["clauses"].items()
        ),
        excluded=tree["excluded"],
    )
