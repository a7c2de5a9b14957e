"""Test workers (``-n 2``) fork from one process that has loaded torch, transformers and the tests, in place of each."""

import shlex
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from rollmatch.cli.processes import has_gpu

ROOT = Path(__file__).parents[1]
CODE = f"""import sys
sys.path[:0] = {[str(ROOT / "impl"), str(ROOT)]!r}
from conformance.cli.cradle import main
sys.exit(main(*sys.argv[1:]))"""
CRADLE = (sys.executable, "-c", CODE)
"""``conformance.cli.cradle``, wherever pytest was started."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """That process loads while this one reads the specification, and ends with it."""
    if hasattr(config, "workerinput") or not getattr(config.option, "tx", None) or has_gpu():
        return
    config.option.testrunuid = config.option.testrunuid or uuid.uuid4().hex
    keeper = subprocess.Popen([*CRADLE, config.option.testrunuid, *config.args], stdin=subprocess.PIPE)
    config.add_cleanup(keeper.communicate)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Never beside a GPU, whose driver does not survive a fork."""
    for spec in specs:
        if spec.popen and not spec.python and not has_gpu():
            spec.python = shlex.join([*CRADLE, config.option.testrunuid, *config.args])
