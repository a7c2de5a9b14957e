"""A backend that is not installed is told before a run begins."""

import importlib.util

import pytest

from conformance.rollout.digits import CONFIG, absolute
from rollmatch.cli import learner
from rollmatch.cli.learner import EngineMissing

BEGUN = "checks are over"


@pytest.fixture
def machine_without_vllm(monkeypatch, tmp_path):
    """Where nothing is begun either."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))

    def begin(*_, **__):
        raise AssertionError(BEGUN)

    monkeypatch.setattr(learner, "open_run_directory", begin)
    return absolute(f"training.output_dir={tmp_path}/run")


@pytest.mark.scenario(
    "rollout-backends/a-missing-vllm-is-an-error-and-not-a-switch-to-hf",
    clauses=["rollout-backends/the-rollout-backend-is-chosen-in-yaml#4,5"],
)
def test_a_missing_vllm_is_an_error_and_not_a_switch_to_hf(machine_without_vllm):
    with pytest.raises(EngineMissing) as caught:
        learner.train(str(CONFIG), overrides=machine_without_vllm)
    assert (caught.value.code, caught.value.key) == (
        "engine-missing",
        "custom.extra.rollout_matching.rollout_backend",
    )
    assert "rollout_backend: hf" in caught.value.remedy


def test_hf_needs_no_vllm(machine_without_vllm):
    backend = "custom.extra.rollout_matching.rollout_backend=hf"
    with pytest.raises(AssertionError, match=BEGUN):
        learner.train(str(CONFIG), overrides=[*machine_without_vllm, backend, NO_LENGTH])


NO_LENGTH = "custom.extra.rollout_matching.vllm.max_model_len=null"
