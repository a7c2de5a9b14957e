"""The pages of promises name tests that exist, and every line that promises something names one."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UNTESTED = (
    "group of the swift and trl dialects",
    "traffic",
    "address",
    "a stranger at the port",
    "the clients themselves",
)
"""Lines that promise nothing."""


def names_of_tests():
    found = set()
    for path in (ROOT / "conformance").rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return found


@pytest.mark.parametrize("page", ["security.md", "failures.md"])
def test_a_page_of_promises_names_tests_that_exist(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 10
    assert named <= names_of_tests()


@pytest.mark.parametrize(
    ("page", "column"), [("security.md", "tests"), ("security.md", "test"), ("failures.md", "tests")]
)
def test_every_line_of_a_table_with_tests_names_one(page, column):
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    heads = [place for place, line in enumerate(lines) if line.endswith(f"| {column} |")]
    assert heads
    for head in heads:
        for line in lines[head + 2 :]:
            if not line.startswith("|"):
                break
            assert "`test_" in line or line.split("|")[1].strip() in UNTESTED, line
