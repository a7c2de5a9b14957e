"""Garbage is not looked for while tests are collected, nor later among what had been loaded by then.

Torch, transformers and some thousand tests are a million objects that stay: to walk them again and again took a third
of the time until the first test.
"""

import gc

import pytest

gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Tests run with the collector on."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Extensions that count what they leave behind find nothing."""
    gc.unfreeze()
