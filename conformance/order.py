"""In which order tests run, and, with several workers, which of them one worker runs.

Alone, quick tests come first. With several workers the long ones do, so that quick ones fill what is left and all
workers end together; and files that share an engine go to one worker, so that it is started once.
"""

import os
from typing import Any

import pytest

ROOMS_OF_PROCESSES = ("cli", "trainer")
WAITING = {
    *(f"conformance/servers/test_{name}.py" for name in ("judging", "lanes")),
    *(f"conformance/dialects/test_{name}.py" for name in ("client_scenarios", "client_session")),
    "conformance/server/test_server_scenarios.py",
    "conformance/weights/test_native_sender.py",
}
"""Files that wait more than they compute: several workers begin them early, beside what computes."""
SHARED = {"instance", "engine_backend"}
"""Fixtures that start an engine for a whole session."""
SHARING = {
    *(f"conformance/rollout/test_{name}.py" for name in ("prefixes", "vllm_colocate")),
    *(f"conformance/server/test_{name}.py" for name in ("client_engine", "engine_dialects", "engine_generation")),
    *(f"conformance/server/test_{name}.py" for name in ("engine_direct", "engine_logprobs", "engine_sync")),
    *(f"conformance/server/test_{name}.py" for name in ("engine_turns", "faults", "vllm_client")),
    "conformance/servers/test_own_server.py",
}
"""Files that ask for them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files keep their tests together; the same order in every worker."""
    for item in items:
        path, asked = item.nodeid.partition("::")[0], set(getattr(item, "fixturenames", ()))
        if asked & SHARED and path not in SHARING:
            raise pytest.UsageError(f"{path} shares an engine: name it in conformance/order.py")
    by_length = "PYTEST_XDIST_WORKER" in os.environ
    items.sort(key=lambda item: (-1 if by_length else 1) * _how_slow(item))


def _how_slow(item: pytest.Item) -> int:
    """Quick, processes, other engines, all that share one (many files, one worker), whole runs."""
    path = item.nodeid.partition("::")[0]
    starts_processes = item.path.parent.name in ROOMS_OF_PROCESSES or path in WAITING
    if path in SHARING:
        return 3
    if item.get_closest_marker("slow"):
        return 4
    if item.get_closest_marker("engine"):
        return 4 if starts_processes else 2
    return 1 if starts_processes else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For ``--dist loadfile``."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # xdist would begin with the files that have most tests

    class Sharing(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return "engines" if path in SHARING else path

    return Sharing(config, log)
