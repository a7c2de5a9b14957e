"""Tests that need GPUs: ``@pytest.mark.gpu(n)``. Where there are fewer, they fail and say so; nothing is skipped."""

from functools import cache

import pytest


@cache
def num_gpus() -> int:
    """GPUs of this machine, without loading torch where there can be none."""
    from rollmatch.run.machine import has_gpu

    if not has_gpu():
        return 0
    import torch

    return torch.cuda.device_count()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture is made."""
    marker = item.get_closest_marker("gpu")
    needed = int(marker.args[0]) if marker and marker.args else 1
    if marker and num_gpus() < needed:
        pytest.fail(f"not testable: needs {needed}, has {num_gpus()}", pytrace=False)
