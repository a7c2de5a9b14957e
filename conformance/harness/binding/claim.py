"""What tests say about themselves by markers, read from their source without running it.

Reading the source tells of every test, also of those that a run leaves out (``-m``, ``-k``, another worker), and
before anything is collected.
"""

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from conformance.harness.spec_error import Finding

ROOT = Path(__file__).parents[3]
CONFORMANCE = ROOT / "conformance"
KINDS = ("scenario", "clause", "kills", "tombstone")
"""Markers of ours; all take texts."""
NAMED = re.compile(rf"\.[\s\\]*(?:{'|'.join(KINDS)})\b")
"""At least every place of a source that names one."""
UNWRITTEN = "the marker's arguments are not written out."


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One text of one marker of one test."""

    kind: str
    text: str
    """As written: an id, or several of one requirement."""
    test: str
    """``file::function``, from the repository's root."""
    line: int
    digest: str
    """Changes with the test's source, decorators left out."""

    @property
    def key(self) -> str:
        return f"{self.test.partition('::')[0]}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """All of a folder. Made by ``read_claims``."""

    found: tuple[Claim, ...]
    findings: tuple[Finding, ...]

    def of(self, kind: str) -> list[Claim]:
        return [claim for claim in self.found if claim.kind == kind]


def read_claims(folder: Path = CONFORMANCE, root: Path = ROOT) -> Claims:
    """Claims of all test files below a folder; findings tell where a marker cannot be read."""
    texts = [(path.relative_to(root).as_posix(), path.read_text("utf-8")) for path in sorted(folder.rglob("test_*.py"))]
    read = [_read_file(name, text) for name, text in texts if NAMED.search(text)]
    return Claims(
        found=tuple(claim for each in read for claim in each.found),
        findings=tuple(finding for each in read for finding in each.findings),
    )


@cache
def _read_file(name: str, text: str) -> Claims:
    """Kept: gates, faults and the matrix all ask for the same."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return Claims(found=(), findings=(_stray(name, error.lineno or 1, f"the file is no Python: {error.msg}."),))
    shared = [call for statement in tree.body if _is_pytestmark(statement) for call in _marker_calls(statement)]
    own = [(test, [call for each in test.decorator_list for call in _marker_calls(each)]) for test in _tests_of(tree)]
    found = tuple(claim for test, calls in own for claim in _claims_of(test, [*shared, *calls], name))
    read = [*shared, *(call for _, calls in own for call in calls)]
    findings = [_stray(name, call.lineno, UNWRITTEN) for call in read if not _is_written_out(call)]
    if len(NAMED.findall(text)) != len(read):  # else each that the source names was read: no need to look
        findings += _strays(tree, read, name)
    return Claims(found=found, findings=tuple(findings))


def _claims_of(test: ast.FunctionDef, calls: list[ast.Call], name: str) -> Iterator[Claim]:
    digest = digest_of(test) if calls else ""
    for call in calls:
        for argument in call.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield Claim(
                    kind=_kind_of(call) or "",
                    text=argument.value,
                    test=f"{name}::{test.name}",
                    line=test.lineno,
                    digest=digest,
                )


def digest_of(test: ast.FunctionDef) -> str:
    """Of a test's code: neither its decorators nor its layout count; 12 hexadecimal digits."""
    bare = ast.FunctionDef(**{**dict(ast.iter_fields(test)), "decorator_list": []})
    return hashlib.sha256(ast.dump(bare).encode()).hexdigest()[:12]


def _strays(tree: ast.Module, read: list[ast.Call], name: str) -> Iterator[Finding]:
    """Markers that are no decorator of a test."""
    called = {id(call.func) for call in read}
    for node in ast.walk(tree):
        named = isinstance(node, ast.Attribute) and node.attr in KINDS and _is_pytest_mark(node.value)
        if named and id(node) not in called:
            yield _stray(name, node.lineno, f"pytest.mark.{node.attr} decorates no test.")


def _stray(name: str, line: int, problem: str) -> Finding:
    remedy = 'Write @pytest.mark.scenario("capability/scenario") above a test function.'
    return Finding(code="marker-unreadable", key=f"{name}:{line}", problem=problem, remedy=remedy)


def _is_written_out(call: ast.Call) -> bool:
    texts = [isinstance(argument, ast.Constant) and isinstance(argument.value, str) for argument in call.args]
    return bool(texts) and all(texts) and not call.keywords


def _tests_of(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def _is_pytestmark(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "pytestmark" for target in statement.targets
    )


def _marker_calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _kind_of(node) in KINDS]


def _kind_of(call: ast.Call) -> str | None:
    """``pytest.mark.scenario(...)`` -> ``scenario``."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) and _is_pytest_mark(function.value) else None


def _is_pytest_mark(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "mark" and getattr(node.value, "id", "") == "pytest"
