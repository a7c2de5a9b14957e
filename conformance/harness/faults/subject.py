"""Two subjects that fulfil nothing: no test that is worth its name passes on either.

Every public function and method of the implementation either does nothing or raises an error of the package's own.
Records and errors stay, as does what tests build their inputs with.
"""

import ast
from collections.abc import Collection, Iterator

from conformance.harness.faults.importer import Change

SPARED = ("errors", "records", "ranks", "config.yaml_dialect", "launch.learner", "launch.gpus")
"""What conftest and the making of inputs need: a test that could not begin would show nothing."""
HOLLOWED = {"vocabulary": ("load",)}
"""Modules of which only these functions are hollow: tests build their inputs with the others."""
SUBJECTS = ("do-nothing", "always-raising")
_RAISE = "raise __import__('rollmatch.errors').errors.ConfigError('always', key='always', remedy='always')"
_BODIES = {"do-nothing": "return None", "always-raising": _RAISE}


def change_for(subject: str, module: str) -> Change | None:
    """How a module of that subject differs; None where it does not."""
    name = module.partition(".")[2]
    if not name or name in SPARED:
        return None
    return lambda source: hollow(source, _BODIES[subject], only=HOLLOWED.get(name))


def hollow(source: str, body: str, *, only: Collection[str] | None = None) -> str:
    """Every public function (or those named) keeps its name and gets another body; lines stay where they are.

    >>> print(hollow("def f(x):\\n    y = x\\n    return y\\ndef _g():\\n    return 1", "return None"))
    def f(x):
        return None
    <BLANKLINE>
    def _g():
        return 1
    """
    lines = source.splitlines()
    for function in _hollow_functions(ast.parse(source), only):
        start, stop = function.body[0], function.end_lineno or function.lineno
        emptied = [""] * (stop - start.lineno)
        lines[start.lineno - 1 : stop] = [lines[start.lineno - 1][: start.col_offset] + body, *emptied]
    return "\n".join(lines) + "\n" * source.endswith("\n")


def _hollow_functions(node: ast.AST, only: Collection[str] | None) -> Iterator[ast.FunctionDef]:
    """None of them inside another."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and (child.name in only if only else is_public(child.name)):
            yield child
        else:
            yield from _hollow_functions(child, only)


def is_public(name: str) -> bool:
    """Whether a caller uses it; the making of objects is left alone."""
    return not name.startswith("_") or name in ("__iter__", "__call__")
