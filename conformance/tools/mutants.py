"""Mutants of ``impl/``, made by cosmic-ray and judged by the tests that reach the mutated line.

    python -m conformance.tools.mutants                      # five minutes over all of impl/, seed from the date
    python -m conformance.tools.mutants --module impl/rollmatch/learn/pack.py --sample 100
    python -m conformance.tools.mutants --diff main          # lines that differ from a branch

``build/coverage`` says which tests reach a line; ``make map`` writes it. A mutant that no test reaches survives.
Left out is what has no behavior: annotations, protocols, overloads, ``@override``, imports for them, ``frozen``,
``slots`` and ``kw_only`` of decorators, and what is written into the text of an error or of a line that is printed.
"""

import argparse
import ast
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from scipy.stats import binomtest

from conformance.tools.reach import tests_beside, tests_of
from conformance.tools.trial import IMPL, ROOT, Trial, TrialResult, run_trials

BUDGET_S = 30
"""Processor time of a mutant's tests after which no further one begins."""
TIMEOUT_S, SLOW_TIMEOUT_S = 120, 400
"""Time until a mutant counts as killed; the second one for tests that start engines."""
CONFIDENCE = 0.998
"""Of the interval around a sample's share: one run in a thousand fails by chance alone."""
SURVIVED, KILLED = ("passed", "not reached"), ("failed", "set-up failed", "timeout")
"""A mutant with which the tests could not run (``broken``) says nothing and does not count."""
Lines = dict[Path, set[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    path: Path
    line: int
    operator: str
    occurrence: int
    """Number of the operator's place in the file."""


def places_of(path: Path) -> list[list[Mutation]]:
    """Mutations by place and kind: ``+`` has eleven replacements, but is one place."""
    places: dict[tuple[int, int, str], list[Mutation]] = {}
    nodes = list(ast_nodes(get_ast_from_path(path)))
    for name in operator_names():
        if get_operator(name).arguments():
            continue  # names of variables, which nobody has given
        starts = (start for node in nodes for start, _ in get_operator(name)().mutation_positions(node))
        for occurrence, (line, column) in enumerate(starts):
            mutation = Mutation(path=path, line=line, operator=name, occurrence=occurrence)
            places.setdefault((line, column, re.sub(r"_[A-Za-z]+$", "", name)), []).append(mutation)
    return list(places.values())


class Behavior(ast.NodeTransformer):
    """Leaves of a module what a mutant has to change so as to count."""

    def visit(self, node: ast.AST) -> Any:
        if _is_message(node):
            for each in ast.walk(node):
                if isinstance(each, ast.JoinedStr):
                    each.values = []
        return super().visit(node)

    def visit_arguments(self, node: ast.arguments) -> Any:
        """Only type checkers read annotations; the star of a signature stands between."""
        node.args = node.posonlyargs + node.args + node.kwonlyargs
        node.defaults += [each for each in node.kw_defaults if each]
        node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
        for each in ast.walk(node):
            if isinstance(each, ast.arg):
                each.annotation = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Any:
        """Overloads have no body."""
        node.returns = None
        node.decorator_list = [each for each in node.decorator_list if not ast.unparse(each).endswith("override")]
        return None if ast.unparse(node.body[-1]) == "..." else self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> Any:
        return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        if any(ast.unparse(base).startswith("Protocol") for base in node.bases):
            return None
        for call in node.decorator_list:
            if isinstance(call, ast.Call):
                call.keywords = [each for each in call.keywords if each.arg not in ("frozen", "slots", "kw_only")]
        return self.generic_visit(node)


def _is_message(node: ast.AST) -> bool:
    """Whether the texts in a node are those of an error, or printed."""
    match node:
        case ast.Raise() | ast.Call(func=ast.Name(id="print")):
            return True
        case ast.Call(keywords=keywords):
            return any(each.arg == "remedy" for each in keywords)
        case ast.Assign(targets=targets):
            names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
            return bool(names & {"problem", "remedy"})
    return False


def behavior_of(source: str) -> str:
    return ast.dump(Behavior().visit(ast.parse(source)))


def draw(lines: Lines, chance: random.Random) -> Iterator[Trial]:
    """Places in random order, of each one mutation that counts; a file is read when it is drawn, by its length."""
    order = [path for path in sorted(lines) for _ in lines[path]]
    chance.shuffle(order)
    left: dict[Path, list[list[Mutation]]] = {}
    for path in order:
        if path not in left:
            left[path] = [place for place in places_of(path) if place[0].line in lines[path]]
            chance.shuffle(left[path])
        mutations = left[path].pop() if left[path] else []
        sources = ((each, mutated(each)) for each in chance.sample(mutations, len(mutations)))
        yield from islice((trial_of(each, source) for each, source in sources if source), 1)


def mutated(mutation: Mutation) -> str | None:
    """The changed source, if cosmic-ray can make it, Python can read it, and it behaves in another way."""
    text = mutation.path.read_text(encoding="utf-8")
    try:
        source = mutate_code(text, get_operator(mutation.operator)(), mutation.occurrence)
        return source if source and behavior_of(source) != behavior_of(text) else None
    except (SyntaxError, AttributeError):  # cosmic-ray does not replace ``except (a.B, C)``
        return None


def trial_of(mutation: Mutation, source: str) -> Trial:
    path, line = mutation.path, mutation.line
    tests = tests_of(path, line)
    changed = "".join(source.splitlines()[line - 1 : line]).strip()  # nothing where a last line was removed
    name = f"{path.relative_to(ROOT)}:{line} {mutation.operator.partition('/')[2]}: {changed}"
    timeout_s = SLOW_TIMEOUT_S if tests_beside(path) else TIMEOUT_S
    settings = {"timeout_s": timeout_s, "budget_s": BUDGET_S, "with_doctests": ">>>" in source}
    return Trial(name=name, path=path.relative_to(IMPL), source=source, tests=tests, **settings)


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


def judge(trials: Iterable[Trial], *, minutes: float, workers: int) -> dict[str, Counter[str]]:
    """Outcomes by package of the mutants that the time allows; survivors are printed."""
    end, outcomes = time.monotonic() + 60 * minutes, dict[str, Counter[str]]()
    results = list[TrialResult]()
    for result in run_trials(takewhile(lambda _: time.monotonic() < end, trials), num_workers=workers):
        results.append(result)
        if result.outcome in SURVIVED:
            sys.stdout.write(f"survived ({result.outcome}) {result.trial.name}\n")
            sys.stdout.flush()
    alone = failing_alone({test for result in results for test in failed_in(result)})
    for result in results:
        package = result.trial.path.parts[1].removesuffix(".py")
        means_little = result.outcome in ("failed", "set-up failed") and alone.issuperset(failed_in(result))
        outcome = "passed" if means_little else result.outcome
        outcomes.setdefault(package, Counter())[outcome] += 1
        if outcome != result.outcome:
            sys.stdout.write(f"survived (its test fails without it) {result.trial.name}\n")
    return outcomes


def failed_in(result: TrialResult) -> set[str]:
    """Tests that failed in a trial, also in their set-up; examples in docstrings with a path of the copy."""
    return set(re.findall(r"^(?:FAILED|ERROR) (\S*::\S+(?: \S+)*?)(?: - |$)", result.log, re.MULTILINE))


def failing_alone(tests: set[str]) -> set[str]:
    """Those of the tests that fail in a trial that changes nothing: they kill no mutant."""
    path, failing = IMPL / "rollmatch/errors.py", set[str]()
    left = {test for test in tests if test.startswith("conformance/")}
    while left:
        settings = {"timeout_s": SLOW_TIMEOUT_S, "source": path.read_text(encoding="utf-8")}
        trial = Trial(name="unchanged", path=path.relative_to(IMPL), tests=tuple(sorted(left)), **settings)
        (result,) = run_trials([trial], num_workers=1)
        if not (failed := failed_in(result) & left):
            break
        failing, left = failing | failed, left - failed
    return failing


def counts_of(outcomes: Counter[str]) -> tuple[int, int]:
    """Number of killed mutants, and of all that count."""
    killed = sum(outcomes[each] for each in KILLED)
    return killed, killed + sum(outcomes[each] for each in SURVIVED)


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
    paths = [path.resolve() for path in options.module or ()] or list(IMPL.rglob("*.py"))
    lines = {path: set(range(1, 1 + len(path.read_bytes().splitlines()))) for path in paths}
    if options.diff:
        changed = changed_lines(options.diff)
        lines = {path: changed[path] for path in paths if path in changed}
    trials = islice(draw(lines, random.Random(options.seed)), options.sample)
    packages = judge(trials, minutes=options.minutes, workers=options.workers)
    for package in sorted(packages):
        sys.stdout.write("{}: {} of {}\n".format(package, *counts_of(packages[package])))
    outcomes = sum(packages.values(), Counter[str]())
    killed, total = counts_of(outcomes)
    likely = 100 * binomtest(killed, max(total, 1)).proportion_ci(CONFIDENCE, method="wilson").high
    share = f"{100 * killed / max(total, 1):.1f} %, at most {likely:.0f} % of all"
    sys.stdout.write(f"seed {options.seed}: {killed} of {total} killed, {share} {dict(outcomes)}\n")
    return 1 if likely < options.fail_under or outcomes["broken"] > outcomes.total() / 4 else 0


if __name__ == "__main__":
    raise SystemExit(main())
