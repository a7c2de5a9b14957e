"""What a configuration names by ``module:name``. Needs no torch."""

import importlib
import sys
from pathlib import Path
from typing import Any

from rollmatch.errors import ConfigError


def load_named(name: str, *, key: str, kind: str, refuse: type[ConfigError]) -> Any:
    """Import ``module:name``; modules of the working directory are found, too. Errors: ``refuse``.

    >>> load_named("math:isqrt", key="x", kind="function", refuse=ConfigError)(17)
    4
    """
    module_name, _, own_name = name.partition(":")
    if not module_name or not own_name or module_name.startswith("."):  # also a path: ./mine.py
        raise refuse(f"is {name!r}, not module:{kind}", key=key, remedy=f"Write package.module:{kind}.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return getattr(importlib.import_module(module_name), own_name)
    except (ImportError, AttributeError, SyntaxError, SystemExit) as error:  # a script may end itself when imported
        remedy = "The module is looked for among installed packages and in the working directory."
        raise refuse(f"{name}: {type(error).__name__}: {error}", key=key, remedy=remedy) from error
