"""What every room shares: the environment a run has, and the one vLLM engine a process may have."""

import os
import sys
from contextlib import suppress
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings

from rollmatch.cli.learner import set_environment

pytest_plugins = [
    *("conformance.garbage", "conformance.outside_tools", "conformance.gpus", "conformance.servers.plugin"),
    *("conformance.harness.plugin", "conformance.order", "conformance.workers"),
]

if "PYTEST_XDIST_WORKER" in os.environ:
    # Linux shares the processor among sessions: a worker of its own session does not starve while the other computes.
    with suppress(PermissionError):  # it leads one already
        os.setsid()

set_environment()  # before torch and vLLM load: some variables only count then


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A ring leaves torch with as many threads as cores: ten times slower with small models beside other workers."""
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
        cast(Any, sys.modules["torch"]).set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


# How long an example takes says more about the machine than about the code. What decides about a change draws the same
# examples every time; everyone else looks for new ones, and at half as many: with these, too, properties notice every
# fault that they are to notice. Who has the time looks at more, ROLLMATCH_EXAMPLES of them.
strict = "ROLLMATCH_STRICT" in os.environ
settings.register_profile(
    "any machine",
    deadline=None,
    max_examples=int(os.environ.get("ROLLMATCH_EXAMPLES", "100" if strict else "50")),
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=strict,
)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def engine_backend():
    """A real engine with the digits model, started by the first test that asks for it; hand it weights before use."""
    from conformance.rollout.engine import open_engine
    from rollmatch.ranks import Ranks

    backend = open_engine(Ranks())
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def instance(tmp_path_factory):
    """A rollout server with two replicas, a process of its own; hand it weights before use."""
    from conformance.server.instance import running

    with running(tmp_path_factory.mktemp("server") / "log", data_parallel_size=2, drain_s=0.1) as started:
        yield started
        started.leave()
