"""A backend that is not installed is refused before a run begins; what ``auto`` means on a machine."""

import importlib.util

import pytest

from conformance.doubles.configs import LONG
from conformance.doubles.digits import CONFIG, absolute, load_digits
from conformance.doubles.refusals import refused
from conformance.doubles.tiny_qwen3_vl import make_tiny_qwen3
from rollmatch.config.effective import compiles_layers
from rollmatch.launch import learner
from rollmatch.run.computing import is_padding_free

BEGUN = "checks are over"
FRESH = {"resume": False, "overwrite": False, "wait": learner.WaitPolicy()}


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
    with refused("engine-missing", f"{LONG}rollout_backend", remedy="rollout_backend: hf"):
        learner.train(str(CONFIG), overrides=machine_without_vllm, **FRESH)
    hf = (f"{LONG}rollout_backend=hf", f"{LONG}vllm.max_model_len=null")
    with pytest.raises(AssertionError, match=BEGUN):
        learner.train(str(CONFIG), overrides=[*machine_without_vllm, *hf], **FRESH)


@pytest.mark.parametrize(("key", "value"), [("padding_free", "true"), ("tokens_per_micro_batch", 4096)])
def test_a_sliding_window_is_not_concatenated(key, value):
    config, model = load_digits("training.packing=false", f"training.{key}={value}"), make_tiny_qwen3()
    assert is_padding_free(config, model)
    model.config.layer_types = ["sliding_attention"] * 2
    with refused("sliding-window-packed", f"training.{key}"):
        is_padding_free(config, model)


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "num_parameters", "expected"),
    [
        ((), True, 2 * 10**9, True),
        ((), True, 10**8, False),
        ((), False, 2 * 10**9, False),
        (("tuner.train_type=lora", "tuner.lora_dropout=0.1"), True, 2 * 10**9, False),
        (("training.strategy=fsdp2",), True, 2 * 10**9, True),
        (("training.strategy=fsdp2", "tuner.train_type=lora", "tuner.use_dora=true"), True, 2 * 10**9, False),
        (("training.strategy=deepspeed_zero3",), True, 2 * 10**9, False),
        (("training.compile_layers=true",), False, 10**8, True),
        (("training.compile_layers=false",), True, 2 * 10**9, False),
    ],
)
def test_layers_are_compiled_where_it_pays_and_works(overrides, on_gpu, num_parameters, expected):
    config = load_digits(*overrides)
    assert compiles_layers(config, on_gpu=on_gpu, num_parameters=num_parameters) is expected
