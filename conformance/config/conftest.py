"""Required keys with dotted keys laid over them, as ``conformance/scenarios/configs.py`` makes them."""

import pytest

from conformance.scenarios.configs import LONG, VALID, config_with, problems_of


@pytest.fixture
def required():
    return VALID


@pytest.fixture
def make_with():
    return config_with


@pytest.fixture
def problems_with():
    """Overrides that are rejected -> [(code, key)], ``~`` for the long section."""

    def list_problems(*overrides):
        errors = problems_of(*overrides)
        assert all(error.problem and error.remedy for error in errors)
        return [(error.code, error.key.replace(LONG, "~.")) for error in errors]

    return list_problems
