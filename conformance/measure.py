"""Figures of the tree, each beside its bar: ``python -m conformance.measure``."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPL = ROOT / "impl" / "rollmatch"


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def num_lines(paths: list[Path]) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in paths)


def harness_files() -> list[Path]:
    """Python below ``conformance/`` that is neither a test nor a check of servers."""
    outside = [path for path in python_files(ROOT / "conformance") if "servers" not in path.parts]
    return [path for path in outside if not re.match(r"test_|conftest\.py", path.name)]


def repeated_classes() -> list[str]:
    """Class names that the tree defines more than once."""
    names = Counter(
        node.name
        for folder in ("impl", "conformance", "fixtures", "benchmarks")
        for path in python_files(ROOT / folder)
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


def long_functions() -> list[str]:
    """Functions of the implementation with more than 40 lines."""
    return [
        f"{path.relative_to(IMPL)}:{node.lineno}"
        for path in python_files(IMPL)
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 40
    ]


def rows() -> Iterator[tuple[str, object, str]]:
    """(name, figure, bar) of what is counted."""
    yield "Python in conformance/ that is no test (without servers/)", num_lines(harness_files()), "6000"
    yield "Python in conformance/", num_lines(python_files(ROOT / "conformance")), "32000"
    yield "class names used twice", len(repeated_classes()), "0"
    texts = [path.read_text(encoding="utf-8") for path in python_files(IMPL)]
    yield "Any in impl/", sum(len(re.findall(r"\bAny\b", text)) for text in texts), "350"
    yield "functions over 40 lines in impl/", len(long_functions()), "0"
    yield "files over 300 lines in impl/", sum(len(text.split("\n")) > 301 for text in texts), "0"


def main() -> None:
    """Print one line a figure, and names that are used twice."""
    for figure_name, figure, bar in rows():
        sys.stdout.write(f"{figure!s:>7}  at most {bar:>5}  {figure_name}\n")
    for name in repeated_classes():
        sys.stdout.write(f"twice: {name}\n")


if __name__ == "__main__":
    main()
