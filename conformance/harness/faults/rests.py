"""What a verdict rests on: the functions of ours that its trial ran, each known by what it says.

A file falls into pieces: each function that is not inside another, each method, and what stands around them. A piece
is known by a short digest of its lines without comments and docstrings. A verdict is fresh as long as every piece that
its trial ran still stands somewhere as it did. What other processes ran is not seen; this folder is left out: who
changes how faults are tried tries them all.
"""

import ast
import hashlib
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[3]
RESTS = Path(__file__).with_name("rests.txt")
FOLDERS = ("impl/rollmatch", "conformance")
OURS = tuple(f"{ROOT / folder}/" for folder in FOLDERS)
HERE = f"{Path(__file__).parent}/"
DIGITS = 6
IS_FUNCTION = 1
"""Flag of code whose names are local: not that of a module or a class."""
AROUND = (0, 0)
"""The lines of the piece that stands around functions."""
Defined = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Piece:
    """First and last line, from 1, and digest."""

    lines: tuple[int, int]
    digest: str


def pieces_of(source: str) -> list[Piece]:
    """Of a file; what stands around functions comes last.

    >>> one = pieces_of("import os\\nX = 1\\ndef f():\\n    '''Told.'''\\n    return X\\n")
    >>> two = pieces_of("X = 1\\n\\n\\ndef f():\\n    # why\\n    return X\\n")
    >>> [piece.lines for piece in two], [a.digest == b.digest for a, b in zip(one, two)]
    ([(4, 6), (0, 0)], [True, True])
    """
    tree, lines = ast.parse(source), source.splitlines()
    told = {line for text in _texts(tree) for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    kept = {number: line for number, line in enumerate(lines, 1) if number not in told and _says_something(line)}
    spans = [_span(function) for function in _functions(tree)]
    pieces = [Piece(span, _digest(kept.get(number, "") for number in range(span[0], span[1] + 1))) for span in spans]
    inside = {number for first, last in [*spans, *_imports(tree)] for number in range(first, last + 1)}
    return [*pieces, Piece(AROUND, _digest(line for number, line in kept.items() if number not in inside))]


def _says_something(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _digest(lines: Iterator[str]) -> str:
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()[:DIGITS]


def _texts(tree: ast.AST) -> Iterator[ast.stmt]:
    """Docstrings, and other texts that nobody reads but people."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node


def _functions(tree: ast.Module | ast.ClassDef) -> Iterator[Defined]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node)


def _imports(tree: ast.Module) -> Iterator[tuple[int, int]]:
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield _span(node)


def _span(node: ast.stmt) -> tuple[int, int]:
    decorators = node.decorator_list if isinstance(node, Defined) else []
    return min([node.lineno, *(each.lineno for each in decorators)]), node.end_lineno or node.lineno


class Ran:
    """Functions of ours that were called while it watched, in this process."""

    def __init__(self) -> None:
        self._seen: dict[int, CodeType] = {}

    def watch(self) -> None:
        """From now on."""
        threading.settrace(self._note)
        sys.settrace(self._note)

    def stop(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if id(code) not in self._seen:  # codes compare by all that they hold, which takes long
            self._seen[id(code)] = code

    def lines(self) -> dict[str, list[int]]:
        """File -> where what ran begins."""
        lines: dict[str, set[int]] = {}
        for code in self._seen.values():
            name = code.co_filename
            if name.startswith(OURS) and not name.startswith(HERE) and code.co_flags & IS_FUNCTION:
                lines.setdefault(name, set()).add(code.co_firstlineno)
        return {name: sorted(ran) for name, ran in lines.items()}


def digests_of(lines: Mapping[str, Collection[int]], *, changed: Path | None = None) -> list[str]:
    """Of the pieces that ran; of the file that a fault has changed, which has other lines, all."""
    found = {piece.digest for name, ran in lines.items() for piece in _pieces_at(name, ran)}
    if changed is not None:
        found |= {piece.digest for piece in _pieces_in(str(changed))}
    return sorted(found)


def _pieces_at(name: str, lines: Collection[int]) -> Iterator[Piece]:
    """Those that hold one of the lines, and what stands around them."""
    for piece in _pieces_in(name):
        first, last = piece.lines
        if piece.lines == AROUND or any(first <= line <= last for line in lines):
            yield piece


@cache
def _pieces_in(name: str) -> list[Piece]:
    """Of a file; read once, as modules are."""
    return pieces_of(Path(name).read_text(encoding="utf-8"))


def digests_now() -> set[str]:
    """Of every piece of the implementation and of its tests."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return {piece.digest for path in paths for piece in pieces_of(path.read_text(encoding="utf-8"))}


def read_rests(path: Path = RESTS) -> dict[str, list[str]]:
    """Fault -> digests."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {fault_id: digests for fault_id, *digests in (line.split() for line in lines)}


def write_rests(rests: dict[str, list[str]], path: Path = RESTS) -> None:
    """A line for each fault, so that those who try different faults do not meet."""
    lines = [" ".join([fault_id, *digests]) for fault_id, digests in sorted(rests.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
