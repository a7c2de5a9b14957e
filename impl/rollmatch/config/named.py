"""What a configuration names by ``module:name``. Needs no torch."""

import importlib
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rollmatch.errors import ConfigError, kind_and_text


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
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module may do anything when it is imported, and end itself
        remedy = f"Correct it; python -c 'import {module_name}' shows where."
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            remedy = "The module is looked for among installed packages and in the working directory."
            if error.name == "trl":  # whose rewards import-config names
                remedy = "Install it: pip install trl math_verify."
            if module_name.endswith(".py"):
                remedy = f"Write {module_name.removesuffix('.py')}:{own_name}."
        raise refuse(f"{name}: {kind_and_text(error)}", key=key, remedy=remedy) from error
    if not hasattr(module, own_name):
        close = get_close_matches(own_name, vars(module))
        remedy = f"Did you mean {module_name}:{close[0]}?" if close else f"Name what {module.__file__} defines."
        raise refuse(f"{name}: the module has no {own_name}", key=key, remedy=remedy)
    return getattr(module, own_name)
