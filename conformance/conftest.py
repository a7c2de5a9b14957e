"""What every room shares: the environment a run has, and the one vLLM engine a process may have."""

import pytest

from rollmatch.launch.learner import set_environment

pytest_plugins = ["conformance.outside_tools", "conformance.harness.binding.plugin"]

set_environment()  # before torch and vLLM load: some variables only count then


@pytest.fixture(scope="session")
def engine_backend():
    """A real engine with the digits model, started by the first test that asks for it; hand it weights before use."""
    from conformance.rollout.engine import open_engine
    from rollmatch.ranks import Ranks

    backend = open_engine(Ranks())
    yield backend
    backend.close()
