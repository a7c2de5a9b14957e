"""Rules that tie specifications and their sources together: every clause has a row, every row a clause."""

import re
from collections.abc import Iterable, Iterator, Sequence

from conformance.harness.sources import ClauseRow, Sources
from conformance.harness.spec_error import Finding
from conformance.harness.spec_reader import Spec

_SEED_LINES = re.compile(r"(\d{3}):([1-9]\d*)(?:-([1-9]\d*))?")
_CONTRADICTION = {"question", "said", "ruling"}


def check_sources(sources: Sources, specs: Sequence[Spec], *, gone: Iterable[str]) -> Iterator[Finding]:
    """Broken rules; ``gone`` are the ids of requirements that some change added and a later one removed."""
    yield from _check_clauses(sources, specs)
    yield from _check_references(sources)
    yield from _check_rulings(sources)
    yield from _check_removed(sources, specs, gone)


def _check_clauses(sources: Sources, specs: Sequence[Spec]) -> Iterator[Finding]:
    rows = {(row.requirement_id, row.says) for row in sources.rows}
    clauses = set()
    for spec in specs:
        for requirement in spec.requirements:
            for sentence in requirement.clauses:
                clauses.add((requirement.requirement_id, sentence.text))
                if (requirement.requirement_id, sentence.text) not in rows:
                    remedy = "Add a row; python -m conformance.harness.trace prints it."
                    problem = f"{sentence.text!r} has no row."
                    yield _finding("clause-untraced", f"{spec.path}:{sentence.line}", problem, remedy)
    for row in sources.rows:
        if (row.requirement_id, row.says) not in clauses:
            problem = "no such sentence stands in this requirement."
            yield _finding(
                "clause-stale", row.clause_id, problem, "Correct says, or remove the row and put its id under retired."
            )
        yield from _check_row(row, sources.retired)


def _check_row(row: ClauseRow, retired: Sequence[str]) -> Iterator[Finding]:
    if row.number < 1:
        yield _finding("clause-number", row.clause_id, "the id does not end in # and a number from 1.", "Number it.")
    if row.clause_id in retired:
        problem = "the number belonged to a sentence that is gone."
        yield _finding("clause-number-reused", row.clause_id, problem, "Take the next number.")
    if not row.origins:
        problem = "nothing says where the clause comes from."
        yield _finding("clause-without-source", row.clause_id, problem, "Name a seed's line or a ruling.")


def _check_references(sources: Sources) -> Iterator[Finding]:
    for place, reference in sources.references():
        lines = _SEED_LINES.fullmatch(reference)
        kind, _, name = reference.partition(":")
        if lines is not None:
            first, last = int(lines.group(2)), int(lines.group(3) or lines.group(2))
            if lines.group(1) not in sources.seeds or last < first:
                problem = f"{reference!r} names no seed, or lines backwards."
                yield _finding("source-unknown", place, problem, "Name one of seeds and lines in order.")
        elif kind != "ruling" or name not in {*sources.contradictions, *sources.decisions}:
            remedy = "Write SEED:LINE, SEED:FIRST-LAST or ruling:NAME of a contradiction or decision."
            yield _finding("source-unknown", place, f"{reference!r} is no source.", remedy)


def _check_rulings(sources: Sources) -> Iterator[Finding]:
    used = {reference.removeprefix("ruling:") for _, reference in sources.references()}
    for name in (*sources.contradictions, *sources.decisions):
        if name not in used:
            yield _finding("ruling-unused", name, "no clause follows from this ruling.", "Cite or remove it.")
    for name, row in sources.contradictions.items():
        if set(row) != _CONTRADICTION or not row["said"]:
            problem = "a contradiction has a question, what was said, and a ruling."
            yield _finding("contradiction-form", name, problem, "Give it all three.")
    for name in sources.contradictions.keys() & sources.decisions.keys():
        yield _finding("ruling-repeated", name, "the name stands for two rulings.", "Rename one.")


def _check_removed(sources: Sources, specs: Sequence[Spec], gone: Iterable[str]) -> Iterator[Finding]:
    there = {requirement.requirement_id for spec in specs for requirement in spec.requirements}
    for requirement_id in sorted(set(gone) - sources.removed.keys()):
        problem = "the requirement was removed, but nothing says where it came from and what took it away."
        yield _finding("removal-untraced", requirement_id, problem, "Add it under removed.")
    for requirement_id in sorted(sources.removed.keys() - (set(gone) - there)):
        problem = "the requirement was not removed by any change."
        yield _finding("removal-unknown", requirement_id, problem, "Correct the id, or remove the row.")


def _finding(code: str, key: str, problem: str, remedy: str) -> Finding:
    return Finding(code=code, key=key, problem=problem, remedy=remedy)
