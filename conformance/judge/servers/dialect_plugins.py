"""Dialects that are not part of the judge: a class in a Python file, or an entry point of an installed package."""

import importlib.util
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import Any

from conformance.judge.servers.check import ALL
from conformance.judge.servers.dialects import DIALECTS

GROUP = "rollmatch.dialects"
"""Entry points, each of which names a class."""
SUFFIX = ".py"
REQUIRED = "name family signs health_path generate_path picture_path incomplete routes quick_call body spoilt read"
_plugged: dict[str, type[Any]] = {}


class DialectUnusable(ValueError):
    """A plug-in defines one dialect, with all that the judge needs."""


def kinds() -> Mapping[str, type[Any]]:
    """Classes by name; those of plug-ins come first, as their servers may show the routes of a family, too."""
    for entry in _installed():
        if entry.name not in _plugged:
            add_dialect(entry.load(), where=entry.value)
    return _plugged | DIALECTS


@cache
def _installed() -> EntryPoints:
    """Looked for once: it takes 25 ms, and every reply is read by its dialect."""
    return entry_points(group=GROUP)


def kind_of(named: str) -> type[Any]:
    """Return the class of this name, or of the file ``PATH.py``. Errors: ``DialectUnusable``."""
    if named.endswith(SUFFIX):
        return _read_file(Path(named))
    if named not in kinds():
        raise DialectUnusable(f"{named} is none of {', '.join(kinds())}, and no file {SUFFIX}")
    return kinds()[named]


def add_dialect(kind: type[Any], *, where: str) -> None:
    """From now on servers may speak it. Errors: ``DialectUnusable``."""
    from conformance.judge.servers.checks import BY_ID  # loads all checks, which read replies by their dialects

    if missing := [word for word in REQUIRED.split() if not hasattr(kind, word)]:
        raise DialectUnusable(f"{where}: {kind} lacks {', '.join(missing)}")
    if kind.name in DIALECTS:
        raise DialectUnusable(f"{where}: the name {kind.name} belongs to the judge; choose another")
    if kind.family not in ALL:
        raise DialectUnusable(f"{where}: the family {kind.family} is none of {', '.join(ALL)}")
    if unknown := sorted({*kind.not_applicable} - {*BY_ID}):
        raise DialectUnusable(f"{where}: not_applicable names no check: {', '.join(unknown)}")
    _plugged[kind.name] = kind


def _read_file(path: Path) -> type[Any]:
    spec = importlib.util.spec_from_file_location(f"rollmatch_dialect_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise DialectUnusable(f"there is no file {path}")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = [each for each in vars(module).values() if getattr(each, "__module__", "") == spec.name]
    found = [each for each in own if isinstance(each, type) and hasattr(each, "generate_path")]
    if len(found) != 1:
        raise DialectUnusable(f"{path} defines {len(found)} dialects, not one class with a generate_path")
    found[0].file = str(path)
    add_dialect(found[0], where=str(path))
    return found[0]
