"""Mutants of ``impl/``, made by cosmic-ray and judged by the tests that reach the mutated line.

    python -m conformance.harness.mutants                      # five minutes over all of impl/, seed from the date
    python -m conformance.harness.mutants --module impl/rollmatch/learn/pack.py --sample 100
    python -m conformance.harness.mutants --diff main          # lines that differ from a branch

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
from functools import cache
from itertools import islice, takewhile
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from parso.tree import NodeOrLeaf
from scipy.stats import binomtest

from conformance.harness.reach import slow_tests_of, tests_of, tree_of
from conformance.harness.trial import IMPL, ROOT, Trial, TrialResult, run_trials

BUDGET_S = 30
"""Processor time of a mutant's tests after which no further one begins."""
TIMEOUT_S, SLOW_TIMEOUT_S = 120, 400
"""Time until a mutant counts as killed; the second one for tests that start engines."""
CONFIDENCE = 0.998
"""Of the interval around a sample's share: one run in a thousand fails by chance alone."""
SURVIVED, KILLED = ("passed", "not reached"), ("failed", "set-up failed", "timeout")
"""A mutant with which the tests could not run (``broken``) says nothing and does not count."""
MUTABLE = re.compile(
    r"[-+*/%<>@]|[=!]=|\b(\d|(and|or|not|if|elif|while|for|is|in|True|False|break|continue|except|assert)\b)"
)
Lines = dict[Path, set[int]]
Span = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    path: Path
    line: int
    operator: str
    occurrence: int
    """Number of the operator's place in the file."""


@cache
def places_of(path: Path) -> dict[int, list[list[Mutation]]]:
    """Line -> mutations of one place and kind together: ``+`` has eleven replacements, but is one place."""
    places: dict[tuple[int, ...], dict[str, list[Mutation]]] = {}
    spans, nodes = list(_spans_without_behavior(tree_of(path))), list(ast_nodes(get_ast_from_path(path)))
    spans += [(node.start_pos, node.end_pos) for node in nodes if _is_star_of_signature(node)]
    for name in operator_names():
        kind = re.sub(r"_[A-Za-z]+$", "", name)
        if get_operator(name).arguments():
            continue  # names of variables, which nobody has given
        starts = (start for node in nodes for start, _ in get_operator(name)().mutation_positions(node))
        for occurrence, start in enumerate(starts):
            if not any(begin <= start < end for begin, end in spans):
                mutation = Mutation(path=path, line=start[0], operator=name, occurrence=occurrence)
                places.setdefault(start, {}).setdefault(kind, []).append(mutation)
    lines: dict[int, list[list[Mutation]]] = {}
    for (line, _), kinds in places.items():
        lines.setdefault(line, []).extend(kinds.values())
    return lines


def _is_star_of_signature(node: NodeOrLeaf) -> bool:
    return node.type == "operator" and node.parent is not None and node.parent.type == "parameters"


def _spans_without_behavior(tree: ast.AST) -> Iterator[Span]:
    for node in ast.walk(tree):
        match node:
            case ast.arg(annotation=ast.expr() as part) | ast.AnnAssign(annotation=part):
                yield _span_of(part)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _spans_of_function(node)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") as part):
                yield (part.lineno, part.col_offset), _span_of(part)[1]
            case ast.ClassDef(bases=[*_, ast.Name(id="Protocol")]):
                yield (node.lineno, 0), (node.end_lineno or 0, sys.maxsize)
            case ast.ClassDef(decorator_list=decorators):
                keywords = [each for call in decorators if isinstance(call, ast.Call) for each in call.keywords]
                yield from (_span_of(each) for each in keywords if each.arg in ("frozen", "slots", "kw_only"))
        if _is_message(node):
            yield from (_span_of(each) for each in ast.walk(node) if isinstance(each, ast.JoinedStr))


def _spans_of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Span]:
    """What only type checkers read: the type it returns, ``@override``, and the whole of an overload."""
    if node.returns:
        yield _span_of(node.returns)
    for decorator in node.decorator_list:
        (line, column), end = _span_of(decorator)
        match ast.unparse(decorator).rpartition(".")[2]:
            case "override":
                yield (line, column - 1), end
            case "overload":
                yield (line, 0), (node.end_lineno or 0, sys.maxsize)


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


def _span_of(node: ast.expr | ast.keyword) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


def draw(lines: Lines, chance: random.Random) -> Iterator[Trial]:
    """Lines in random order, of each one mutation that is Python: ``def f(/, x)`` is not."""
    order = [(path, line) for path in sorted(lines) for line in sorted(lines[path])]
    chance.shuffle(order)
    for path, line in order:
        places = [chance.sample(place, len(place)) for place in places_of(path).get(line, ())]
        mutations = (mutation for place in chance.sample(places, len(places)) for mutation in place)
        yield from islice((trial_of(each, source) for each in mutations if (source := mutated(each))), 1)


def mutated(mutation: Mutation) -> str | None:
    """The changed source, if cosmic-ray can make it and Python can read it."""
    text = mutation.path.read_text(encoding="utf-8")
    try:
        source = mutate_code(text, get_operator(mutation.operator)(), mutation.occurrence)
        ast.parse(source or "")
    except (SyntaxError, AttributeError):  # cosmic-ray does not replace ``except (a.B, C)``
        return None
    return source


def trial_of(mutation: Mutation, source: str) -> Trial:
    path, line = mutation.path, mutation.line
    tests = tests_of(path, line)
    changed = "".join(source.splitlines()[line - 1 : line]).strip()  # nothing where a last line was removed
    name = f"{path.relative_to(ROOT)}:{line} {mutation.operator.partition('/')[2]}: {changed}"
    timeout_s = SLOW_TIMEOUT_S if slow_tests_of(path) else TIMEOUT_S
    settings = {"timeout_s": timeout_s, "budget_s": BUDGET_S, "with_doctests": ">>>" in source}
    return Trial(name=name, path=path.relative_to(IMPL), source=source, tests=tests, **settings)


def lines_to_mutate(path: Path) -> set[int]:
    """Lines with something like an operator, a number or a condition: cosmic-ray need not read the other files."""
    texts = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Expr | ast.Constant)]
    texts = [getattr(node, "value", node) for node in texts]
    documentation = {
        line
        for node in texts
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for line in range(node.lineno, (node.end_lineno or 0))
    }
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return {line for line, text in lines if line not in documentation and MUTABLE.search(text)}


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
    changed = changed_lines(options.diff) if options.diff else {}
    paths = [path.resolve() for path in options.module or ()] or list(changed) or list(IMPL.rglob("*.py"))
    lines = {path: changed.get(path) or lines_to_mutate(path) for path in paths}
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
