"""Which test shows which rule: ``scenario`` markers, read from the sources of tests without running them."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from conformance.tools.specification import ROOT, Specification


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A test says that it shows a rule."""

    rule_id: str
    test: str
    """``file::function`` from the repository's root."""
    line: int


def expand(scenarios: Iterable[str], clauses: Iterable[str] = ()) -> list[str]:
    """Ids of a marker's arguments; a clause's text may hold several numbers.

    >>> expand(["packing/a"], ["packing/b#1,3"])
    ['packing/a', 'packing/b#1', 'packing/b#3']
    """
    numbered = [each.partition("#") for each in clauses]
    return [*scenarios, *(f"{name}#{number}" for name, _, numbers in numbered for number in numbers.split(","))]


def read_claims(folder: Path = ROOT / "conformance", root: Path = ROOT) -> list[Claim]:
    """Claims of all test files below a folder. Errors: ``ValueError`` for a marker that is not above a test."""
    claims = []
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.scenario(" in text:
            claims += _claims_of(text, path.relative_to(root).as_posix())
    return claims


def _claims_of(text: str, name: str) -> list[Claim]:
    tree = ast.parse(text)
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    named = sum(isinstance(node, ast.Attribute) and node.attr == "scenario" for node in ast.walk(tree))
    marked = [
        (test, mark)
        for test in tests
        for mark in test.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.scenario"
    ]
    if len(marked) != named:
        raise ValueError(f"{name}: a scenario marker is not above a test function; write it there")
    return [
        Claim(rule_id=rule_id, test=f"{name}::{test.name}", line=mark.lineno)
        for test, mark in marked
        for rule_id in _ids_of(mark)
    ]


def _ids_of(mark: ast.Call) -> list[str]:
    clauses = [ast.literal_eval(each.value) for each in mark.keywords if each.arg == "clauses"]
    return expand([ast.literal_eval(each) for each in mark.args], *clauses)


def map_tests(claims: Iterable[Claim]) -> dict[str, list[str]]:
    """Rule -> its tests."""
    tests: dict[str, list[str]] = {}
    for claim in claims:
        tests.setdefault(claim.rule_id, []).append(claim.test)
    return tests


def unknown(rule_id: str, specification: Specification) -> str:
    """The message for an id that does not exist, with the nearest one that does."""
    known = specification.clauses if "#" in rule_id else specification.scenarios
    near = get_close_matches(rule_id, known, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]}?" if near else "python -m conformance.tools.specification lists all"
    return f"{rule_id!r} is not in the specification; {remedy}"
