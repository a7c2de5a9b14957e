"""The digits model, read once, and its rollouts by the learner's own generate()."""

import pytest

from conformance.doubles.attached import attaching
from conformance.doubles.digits import GREEDY, load_model, requests_for, scenes, template_of
from rollmatch.rollout import retry
from rollmatch.rollout.hf import HfBackend


@pytest.fixture(scope="session")
def sdpa_model():
    """Shared: not to be changed."""
    return load_model()


@pytest.fixture(scope="session")
def template():
    return template_of()


@pytest.fixture(scope="session")
def requests_16():
    return requests_for(scenes()[:16])


@pytest.fixture(scope="session")
def greedy_16(sdpa_model, template, requests_16):
    """16 scenes, greedily, all in one microbatch."""
    return HfBackend(sdpa_model, template, batch_size=16).generate(requests_16, GREEDY)


@pytest.fixture
def attach(monkeypatch, tmp_path):
    """Makes doubles, their backend and a source; a pause between two tries is short."""
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.01)
    with attaching(tmp_path / "journal.jsonl") as make:
        yield make


@pytest.fixture
def attached(attach):
    doubles, backend, source = attach()
    return *doubles, backend, source
