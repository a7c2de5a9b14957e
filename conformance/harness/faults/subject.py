"""Two subjects that fulfil nothing: no test that is worth its name passes on either.

Every public function and method of the implementation either does nothing or raises an error of the package's own.
Records and errors stay, as does what tests build their inputs with.
"""

import ast
from collections.abc import Collection

from conformance.harness.faults.importer import Change

SPARED = ("errors", "records", "ranks", "config.yaml_dialect", "launch.learner")
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
    """Every public function (or those named) keeps its name and gets another body.

    >>> print(hollow("def f(x):\\n    return x\\ndef _g():\\n    return 1", "return None"))
    def f(x):
        return None
    <BLANKLINE>
    def _g():
        return 1
    """
    tree = ast.parse(source)
    (wrapped,) = ast.parse(f"def f():\n    {body}").body
    statements = wrapped.body if isinstance(wrapped, ast.FunctionDef) else []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (node.name in only if only else is_public(node.name)):
            node.body = list(statements)
    return ast.unparse(tree)


def is_public(name: str) -> bool:
    """Whether a caller uses it; the making of objects is left alone."""
    return not name.startswith("_") or name in ("__iter__", "__call__")
