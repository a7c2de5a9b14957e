"""Scenarios and sentences of ``spec/openspec/specs``, each with its id and place.

``python -m conformance.tools.specification`` prints them. OpenSpec itself validates the form of the files.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPECS = ROOT / "spec/openspec/specs"
VERB = re.compile(r"\b(MUST|SHALL|SHOULD|MAY)\b")
CODE = re.compile(r"`[^`]*`")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecEntry:
    """A scenario, or one sentence that demands something."""

    rule_id: str
    """``capability/scenario`` or ``capability/requirement#n``, the n-th such sentence of the requirement."""
    text: str
    """The sentence; of a scenario its steps, one a line."""
    place: str
    """``file:line`` from the repository's root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """Rules by id, in the order of the files."""

    scenarios: Mapping[str, SpecEntry]
    clauses: Mapping[str, SpecEntry]


@cache
def read_specification(folder: Path = SPECS) -> Specification:
    """Read ``folder/<capability>/spec.md``. Errors: ``ValueError`` where an id occurs twice."""
    files = sorted(folder.glob("*/spec.md"))
    rules = [rule for path in files for rule in _rules_of(path.read_text(encoding="utf-8"), path)]
    by_id = {rule.rule_id: rule for rule in rules}
    if len(by_id) < len(rules):
        twice = sorted({rule.place for rule in rules} - {rule.place for rule in by_id.values()})
        raise ValueError(f"{', '.join(twice)}: a later rule has the same id; rename one of them")
    return Specification(
        scenarios={name: rule for name, rule in by_id.items() if "#" not in name},
        clauses={name: rule for name, rule in by_id.items() if "#" in name},
    )


def slug(name: str) -> str:
    """A name as part of an id.

    >>> slug("A `GET /health/` answers, always")
    'a-get-health-answers-always'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _rules_of(text: str, path: Path) -> Iterator[SpecEntry]:
    capability, place = path.parent.name, path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    requirement, number = "", 0
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if line.startswith("### Requirement:"):
            requirement, number = slug(line.partition(":")[2]), 0
        elif line.startswith("#### Scenario:"):
            steps = _steps_below(lines, index)
            rule_id = f"{capability}/{slug(line.partition(':')[2])}"
            yield SpecEntry(rule_id=rule_id, text="\n".join(steps), place=f"{place}:{index + 1}")
        elif requirement and not line.startswith(("#", "-")) and VERB.search(CODE.sub("", line)):
            number += 1
            yield SpecEntry(rule_id=f"{capability}/{requirement}#{number}", text=line, place=f"{place}:{index + 1}")


def _steps_below(lines: list[str], index: int) -> list[str]:
    steps = []
    for line in lines[index + 1 :]:
        if line.startswith("#"):
            break
        if line.strip():
            steps.append(line.removeprefix("- ").replace("**", ""))
    return steps


def main() -> None:
    """Print place and id of every rule."""
    specification = read_specification()
    for rule in (*specification.scenarios.values(), *specification.clauses.values()):
        sys.stdout.write(f"{rule.place}\t{rule.rule_id}\n")


if __name__ == "__main__":
    main()
