"""What every test folder shares: environment, order and groups of tests, and the one vLLM engine a process may have."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings

from conformance.doubles import processes
from rollmatch.run.machine import set_environment

pytest_plugins = [
    "conformance.doubles.judge_wheel",
    "conformance.doubles.run_fixtures",
    "conformance.tools.outside_tools",
    "conformance.tools.gpus",
    "conformance.tools.plugin",
]

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests download nothing
set_environment(eager=True)  # before torch and vLLM load: some variables only count then

strict = "ROLLMATCH_STRICT" in os.environ
settings.register_profile(
    "any machine",
    deadline=None,
    max_examples=int(os.environ.get("ROLLMATCH_EXAMPLES", "100" if strict else "50")),
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=strict,
)
settings.load_profile("any machine")

SHARED = {"instance": "engines", "engine_backend": "engines", "learned_on_one_host": "two-ranks"}
"""Fixtures that start processes for a whole session, and the worker in which their tests run (``--dist loadgroup``)."""
START_PROCESSES = ("run", "launch", "interop", "dialects", "servers", "training", "launchers", "topologies")
"""Folders whose tests take long."""


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # xdist would start with the files that have most tests


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests run in one worker; long ones start first, so that all workers end together."""
    for item in items:
        shared = [SHARED[name] for name in getattr(item, "fixturenames", ()) if name in SHARED]
        item.add_marker(pytest.mark.xdist_group(next(iter(shared), item.nodeid.partition("::")[0])))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_time_class)


def _time_class(item: pytest.Item) -> int:
    """0 for real engines and learning, 1 for processes, 2 for the rest."""
    if item.get_closest_marker("engine") or item.get_closest_marker("slow"):
        return 0
    return 1 if item.path.parent.name in START_PROCESSES else 2


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collected tests and loaded modules stay: the garbage collector need not walk through them, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # extensions count what is left at the end


def pytest_collection_finish(session: pytest.Session) -> None:
    """Processes that tests start find vLLM loaded where there are engine tests."""
    if any(item.get_closest_marker("engine") for item in session.items):
        processes.PRELOAD += processes.ENGINE


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Restore torch's threads: a trainer sets as many as there are cores, which is slow beside other workers."""
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
        cast(Any, sys.modules["torch"]).set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session")
def engine_backend():
    """A real engine with the digits model, started by the first test that asks for it; hand it weights before use."""
    from conformance.doubles.colocated_engine import open_engine
    from rollmatch.ranks import Ranks

    backend = open_engine(Ranks())
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def instance(tmp_path_factory):
    """A rollout server with two replicas, a process of its own; hand it weights before use."""
    from conformance.doubles.instance import ENGINE, running

    log = tmp_path_factory.mktemp("server") / "log"
    own = {"engine_arguments": ENGINE | {"max_num_batched_tokens": 256}}  # prompts are split over several steps
    own |= {"data_parallel_size": 2, "tool_call_parser": "hermes", "dtype": "float"}
    with running(log, drain_s=0.1, **own) as started:
        yield started
        started.leave()
