"""Tests that need a browser or the openspec tool: left out, and said so, where the tool is missing.

With ``ROLLMATCH_STRICT=1``, as in CI, they run everywhere and fail where their tool is missing.
"""

import os
import shutil
from collections.abc import Callable

import pytest

from conformance.harness.openspec_tool import OpenspecMissing, package_folder


def has_browser() -> bool:
    """Whether there is a Chromium to drive."""
    return shutil.which(os.environ.get("CHROMIUM", "chromium")) is not None


def has_openspec() -> bool:
    """Whether the pinned tool is installed, and Node to run it."""
    try:
        package_folder()
    except OpenspecMissing:
        return False
    return shutil.which("node") is not None


TOOLS: dict[str, tuple[Callable[[], bool], str]] = {
    "browser": (has_browser, "install Chromium or set CHROMIUM"),
    "openspec": (has_openspec, "run python -m conformance.harness.openspec_tool (needs Node and npm)"),
}
LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what cannot run here."""
    left_out = config.stash.setdefault(LEFT_OUT, {})
    if os.environ.get("ROLLMATCH_STRICT") == "1":
        return
    missing = [name for name, (is_there, _) in TOOLS.items() if not is_there()]
    gone = {item: name for item in items for name in missing if item.get_closest_marker(name)}
    for name in gone.values():
        left_out[name] = left_out.get(name, 0) + 1
    config.hook.pytest_deselected(items=list(gone))
    items[:] = [item for item in items if item not in gone]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out, and what would let it run."""
    for name, count in config.stash.get(LEFT_OUT, {}).items():
        terminalreporter.write_line(f"NOT RUN: {count} {name} tests; {TOOLS[name][1]}", yellow=True)
