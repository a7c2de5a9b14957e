"""Mutants of function bodies, made by cosmic-ray and judged by the tests that reach the mutated line.

    python -m conformance.harness.mutants                      # five minutes over all of impl/, seed from the date
    python -m conformance.harness.mutants --module impl/rollmatch/learn/pack.py --sample 100
    python -m conformance.harness.mutants --diff main          # lines that differ from a branch

``build/coverage`` says which tests reach a line; ``make map`` writes it. A mutant that no test reaches survives.
"""

import argparse
import ast
import json
import random
import re
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import islice, takewhile
from pathlib import Path

from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_item import MutationSpec
from coverage import CoverageData
from scipy.stats import binomtest

from conformance.harness.trial import IMPL, ROOT, Trial, run_trials

MAP, FAILED = ROOT / "build/coverage", ROOT / ".pytest_cache/v/cache/lastfailed"
MOST_TESTS, BUDGET_S, TIMEOUT_S = 150, 20, 120
"""Tests of a mutant, processor time after which no further one begins, and time until it counts as killed."""
LEFT_OUT = ("ReplaceBinaryOperator_BitOr", "ExceptionReplacer")
"""``int | None`` is an annotation, and fails at import when changed; exceptions with a dotted name stop cosmic-ray."""
CONFIDENCE = 0.998
"""Of the interval around a sample's share: one run in a thousand fails by chance alone."""
SURVIVED, KILLED = ("passed", "not reached"), ("failed", "timeout")
"""A mutant with which the tests could not run (``broken``) says nothing and does not count."""
Lines = dict[Path, set[int]]


@cache
def read_map() -> tuple[CoverageData, Counter[str]]:
    """The map, and of each test the number of files it touches. Errors: ``SystemExit`` without a map."""
    if not MAP.exists():
        raise SystemExit(f"{MAP.relative_to(ROOT)} is missing: run make map")
    data = CoverageData(basename=str(MAP))
    data.read()
    query = (
        "SELECT context.context, count(*) FROM line_bits JOIN context ON context_id = context.id GROUP BY context_id"
    )
    breadth: Counter[str] = Counter()
    with sqlite3.connect(MAP) as connection:
        for context, number in connection.execute(query):
            breadth[test_of(context)] += number
    return data, breadth


def test_of(context: str) -> str:
    """The test of a context ``test@group|phase``; the group is there where xdist dealt tests out by groups.

    >>> test_of("conformance/a/test_b.py::test_c[1@2]@conformance/a/test_b.py|run"), test_of("a.py::test_b|setup")
    ('conformance/a/test_b.py::test_c[1@2]', 'a.py::test_b')
    """
    return re.sub(r"@[\w./-]+$", "", context.rpartition("|")[0])


@cache
def contexts_of(path: Path) -> dict[int, list[str]]:
    """Line -> ``test|phase`` of what reached it."""
    return read_map()[0].contexts_by_lineno(path.relative_to(ROOT).as_posix())


@cache
def places_of(path: Path) -> dict[int, list[list[MutationSpec]]]:
    """Line -> mutations of one place and kind together: ``+`` has eleven replacements, but is one place."""
    places: dict[tuple[int, ...], dict[str, list[MutationSpec]]] = {}
    for item in _all_work_items([path], {}):
        (spec,) = item.mutations
        kind = re.sub(r"_[A-Za-z]+$", "", spec.operator_name.partition("/")[2])
        if not kind.startswith(LEFT_OUT):
            places.setdefault(spec.start_pos, {}).setdefault(kind, []).append(spec)
    lines: dict[int, list[list[MutationSpec]]] = {}
    for (line, _), kinds in places.items():
        lines.setdefault(line, []).extend(kinds.values())
    return lines


def bodies_of(path: Path) -> set[int]:
    """Lines of function bodies."""
    functions = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.FunctionDef)]
    return {line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}


def draw(lines: Lines, chance: random.Random) -> Iterator[MutationSpec]:
    """Lines in random order, of each one mutation."""
    order = [(path, line) for path in sorted(lines) for line in sorted(lines[path])]
    chance.shuffle(order)
    for path, line in order:
        if places := places_of(path).get(line):
            yield chance.choice(chance.choice(places))


def trial_of(spec: MutationSpec) -> Trial:
    path, line = Path(spec.module_path), spec.start_pos[0]
    source = mutate_code(path.read_text(encoding="utf-8"), get_operator(spec.operator_name)(), spec.occurrence) or ""
    tests = tests_of(path, line)[:MOST_TESTS]
    changed = source.splitlines()[line - 1].strip()
    name = f"{path.relative_to(ROOT)}:{line} {spec.operator_name.partition('/')[2]}: {changed}"
    settings = {"timeout_s": TIMEOUT_S, "budget_s": BUDGET_S, "with_doctests": ">>>" in source}
    return Trial(name=name, path=path.relative_to(IMPL), source=source, tests=tests, **settings)


def tests_of(path: Path, line: int) -> tuple[str, ...]:
    """Tests that reach a line. First those that reach a line near it that few tests reach, then narrow ones."""
    breadth = read_map()[1]
    near = [{test_of(each) for each in contexts_of(path).get(line + by, [])} for by in range(-10, 11)]
    rarity = {test: min(len(tests) for tests in near if test in tests) for test in near[10] if can_judge(test)}
    return tuple(sorted(rarity, key=lambda test: (rarity[test], breadth[test], test)))


@cache
def can_judge(test: str) -> bool:
    """Whether a test of the map is still there, and passed when the map was made."""
    file, _, name = test.partition("::")
    path = ROOT / file
    is_there = path.is_file() and f"def {name.partition('[')[0]}(" in path.read_text(encoding="utf-8")
    return is_there and test not in failed_tests()


@cache
def failed_tests() -> frozenset[str]:
    """Tests that failed when the map was made."""
    return frozenset(test_of(f"{test}|") for test in json.loads(FAILED.read_text())) if FAILED.exists() else frozenset()


def changed_lines(branch: str) -> Lines:
    """Lines of ``impl/`` that differ from a branch."""
    command = ["git", "diff", "--unified=0", branch, "--", "impl/*.py"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines: Lines = {}
    for part in re.split(r"^\+\+\+ b/", text, flags=re.MULTILINE)[1:]:
        hunks = re.findall(r"^@@ \S+ \+(\d+)(?:,(\d+))? @@", part, flags=re.MULTILINE)
        changed = {int(first) + more for first, count in hunks for more in range(int(count or 1))}
        lines[ROOT / part.partition("\n")[0]] = changed
    return lines


def judge(specs: Iterator[MutationSpec], *, minutes: float, workers: int) -> Counter[str]:
    """Outcomes of the mutants that the time allows; survivors are printed."""
    end, outcomes = time.monotonic() + 60 * minutes, Counter[str]()
    trials = (trial_of(spec) for spec in takewhile(lambda _: time.monotonic() < end, specs))
    for result in run_trials(trials, num_workers=workers):
        outcomes[result.outcome] += 1
        if result.outcome in SURVIVED:
            sys.stdout.write(f"survived ({result.outcome}) {result.trial.name}\n")
            sys.stdout.flush()
    return outcomes


def main() -> int:
    """Exit status: 1 when the sample shows that fewer mutants than ``--fail-under`` are killed, chance excluded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", nargs="*", type=Path, help="files below impl/; default: all")
    parser.add_argument("--diff", metavar="BRANCH", help="only lines that differ from this branch")
    parser.add_argument("--sample", type=int, default=sys.maxsize, help="mutants at most")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", default=time.strftime("%Y-%m-%d"))
    parser.add_argument("--fail-under", type=float, default=70, metavar="PERCENT")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    changed = changed_lines(options.diff) if options.diff else {}
    paths = [path.resolve() for path in options.module or ()] or list(changed) or list(IMPL.rglob("*.py"))
    lines = {path: bodies_of(path) & changed.get(path, bodies_of(path)) for path in paths}
    specs = islice(draw(lines, random.Random(options.seed)), options.sample)
    outcomes = judge(specs, minutes=options.minutes, workers=options.workers)
    killed = sum(outcomes[each] for each in KILLED)
    total = max(killed + sum(outcomes[each] for each in SURVIVED), 1)
    likely = 100 * binomtest(killed, total).proportion_ci(CONFIDENCE, method="wilson").high
    share = f"{100 * killed / total:.1f} %, at most {likely:.0f} % of all"
    sys.stdout.write(f"seed {options.seed}: {killed} of {total} killed, {share} {dict(outcomes)}\n")
    return 1 if likely < options.fail_under or outcomes["broken"] > outcomes.total() / 4 else 0


if __name__ == "__main__":
    raise SystemExit(main())
