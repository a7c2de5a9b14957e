"""Tests that need GPUs: ``@pytest.mark.gpu(n)``. Where there are fewer, they fail and say so; nothing is skipped."""

from functools import cache

import pytest

NEEDED = pytest.StashKey[set[int]]()


class GpusMissing(pytest.fail.Exception):
    """There are as many GPUs as a test needs."""


@cache
def num_gpus() -> int:
    """Of this machine, without loading torch where there can be none."""
    from rollmatch.cli.processes import has_gpu

    if not has_gpu():
        return 0
    import torch

    return torch.cuda.device_count()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NEEDED] = set()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture is made."""
    marker = item.get_closest_marker("gpu")
    needed = int(marker.args[0]) if marker and marker.args else 1
    if marker and num_gpus() < needed:
        item.config.stash[NEEDED].add(needed)
        raise GpusMissing(f"not testable: needs {needed}, has {num_gpus()}", pytrace=False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Asked for by ``-m gpu``, tests that are not there are no success either."""
    asked = (session.config.getoption("markexpr") or "").strip() == "gpu"
    if asked and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for needed in sorted(config.stash[NEEDED]):
        terminalreporter.write_line(f"not testable: needs {needed}, has {num_gpus()}", red=True)
