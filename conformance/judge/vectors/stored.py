"""The committed vectors: one JSON file a case, ``data/CASE.json``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
"""Version of the files and of the protocol; another number may mean other inputs for the same case."""
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorCase:
    """One function of the specification."""

    name: str
    clauses: tuple[str, ...]
    """Ids of the sentences of the specification that it shows."""
    tolerance: float
    """How far a number may be off, absolutely and in relation to itself; 0: not at all."""
    vectors: tuple["Vector", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """One input with its output; ``vector_id`` is ``case/number``."""

    vector_id: str
    shows: str
    """What is special about it; empty for one that was drawn."""
    given: Mapping[str, Any]
    expected: Mapping[str, Any]


def read_cases(folder: Path = DATA) -> tuple[VectorCase, ...]:
    """All cases, by name. Errors: ``ValueError`` for a file of another format."""
    return tuple(_read(path) for path in sorted(folder.glob("*.json")))


def _read(path: Path) -> VectorCase:
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored["format"] != FORMAT:
        raise ValueError(f"{path.name}: format {stored['format']}, this program reads {FORMAT}")
    vectors = tuple(
        Vector(vector_id=one["id"], shows=one["shows"], given=one["input"], expected=one["output"])
        for one in stored["vectors"]
    )
    clauses, tolerance = tuple(stored["clauses"]), stored["tolerance"]
    return VectorCase(name=stored["case"], clauses=clauses, tolerance=tolerance, vectors=vectors)


def text_of(case: VectorCase, *, seed: int) -> str:
    """A file's text: one vector a line."""
    head = {"format": FORMAT, "case": case.name, "seed": seed, "clauses": case.clauses, "tolerance": case.tolerance}
    lines = [
        json.dumps({"id": v.vector_id, "shows": v.shows, "input": v.given, "output": v.expected}) for v in case.vectors
    ]
    return f'{json.dumps(head)[:-1]}, "vectors": [\n' + ",\n".join(lines) + "\n]}\n"


def select(cases: Sequence[VectorCase], names: Sequence[str]) -> list[VectorCase]:
    """Cases or single vectors by name; all without names. Errors: ``ValueError`` for a name that is none."""
    known = {name for case in cases for name in (case.name, *(v.vector_id for v in case.vectors))}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no case or vector {unknown[0]}; cases: {', '.join(case.name for case in cases)}")
    if not names:
        return list(cases)
    chosen = []
    for case in cases:
        vectors = tuple(v for v in case.vectors if case.name in names or v.vector_id in names)
        if vectors:
            chosen.append(VectorCase(name=case.name, clauses=case.clauses, tolerance=case.tolerance, vectors=vectors))
    return chosen
