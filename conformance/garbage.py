"""Garbage is not looked for while tests are collected, nor later among what had been loaded by then.

Torch, transformers and some thousand tests are a million objects that stay: to walk them again and again took a third
of the time until the first test. What transformers loads for nothing is not there meanwhile either.
"""

import atexit
import gc
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest

from rollmatch.startup import UNNEEDED

MODULES = cast(dict[str, Any], sys.modules)
MANY = 100
SELDOM = (50_000, 20, 100)
"""Thresholds of the collector: as seldom as this, it takes half the time and leaves no more memory in use."""
num_loaded = 0
gc.disable()
atexit.register(gc.unfreeze)  # extensions that count what they leave behind find nothing
MODULES.setdefault(UNNEEDED, None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """In a worker, which forks from what has collected before."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Tests run with the collector on, and may load everything."""
    if MODULES.get(UNNEEDED, gc) is None:
        del MODULES[UNNEEDED]
    gc.freeze()
    gc.set_threshold(*SELDOM)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What tests have loaded since stays as well, however often transformers' trainer asks for a collection."""
    global num_loaded
    if len(MODULES) - num_loaded >= MANY:
        num_loaded = len(MODULES)
        gc.collect()
        gc.freeze()


@pytest.fixture
def nothing_collected() -> Iterator[None]:
    """For what recurs until Python refuses: at that depth nothing that other tests left can be finalized."""
    gc.disable()
    yield
    gc.enable()
