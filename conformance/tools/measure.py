"""Lines of the tree: ``python -m conformance.tools.measure``. Blank lines and comments count."""

import re
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
PARTS = ("impl", "conformance: tests", "judge", "tools", "doubles", "oracle", "fixtures", "benchmarks", "scripts")


def part_of(path: Path) -> str:
    """The part of the tree that a file belongs to.

    >>> part_of(Path("conformance/unit/learn/test_pack.py")), part_of(Path("conformance/judge/ports.py"))
    ('conformance: tests', 'judge')
    """
    if path.parts[0] != "conformance":
        return path.parts[0]
    if path.parts[1] == "judge":
        return "judge"
    if re.match(r"test_|conftest", path.name) or path.parts[1] not in ("tools", "doubles", "oracle", "draws"):
        return "conformance: tests"
    return "oracle" if path.parts[1] == "draws" else path.parts[1]


def main() -> None:
    """Print files and lines of every part, and their sum."""
    files, lines = Counter[str](), Counter[str]()
    for folder in ("impl", "conformance", "fixtures", "benchmarks", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            part = part_of(path.relative_to(ROOT))
            files[part] += 1
            lines[part] += len(path.read_bytes().splitlines())
    table = Table("part", "files", "lines")
    for part in PARTS:
        table.add_row(part, f"{files[part]:,}", f"{lines[part]:,}")
    table.add_row("all", f"{files.total():,}", f"{lines.total():,}")
    Console().print(table)


if __name__ == "__main__":
    main()
