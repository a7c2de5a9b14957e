"""Which adapters of ms-swift the server merges, and which it refuses before a byte is received."""

from types import SimpleNamespace

import pytest

from conformance.doubles.refusals import refused
from rollmatch.dialects.swift.adapter import adapter_plan
from rollmatch.dialects.swift.bodies import PeftConfig
from rollmatch.dialects.trl.bodies import FlatTensor

MODULE = "model.layers.0.mlp.up_proj"
MODEL = SimpleNamespace(aliases={"lm_head.weight": "model.embed_tokens.weight"}, tensors={})


def tensor(name, *shape):
    return FlatTensor(name=f"base_model.model.{name}", dtype="float32", shape=shape, start_idx=0, end_idx=0, numel=0)


def factors(module=MODULE, rank=4):
    return [tensor(f"{module}.lora_A.weight", rank, 8), tensor(f"{module}.lora_B.weight", 6, rank)]


def test_a_factor_pair_is_one_merge_with_the_scaling_of_its_rank():
    (merge,) = adapter_plan(PeftConfig(lora_alpha=8), factors(), MODEL).merges
    assert (merge.name, merge.scaling, merge.magnitude) == (f"{MODULE}.weight", 2.0, None)
    assert (merge.lora_a, merge.lora_b) == tuple(one.name for one in factors())
    (merge,) = adapter_plan(PeftConfig(lora_alpha=8, use_rslora=True), factors(), MODEL).merges
    assert merge.scaling == 4.0


def test_a_magnitude_makes_it_a_dora_and_a_tied_head_has_the_name_that_is_served():
    parts = [*factors("lm_head"), tensor("lm_head.lora_magnitude_vector.weight", 6)]
    (merge,) = adapter_plan(PeftConfig(lora_alpha=8), parts, MODEL).merges
    assert (merge.name, merge.magnitude) == ("model.embed_tokens.weight", parts[2].name)


@pytest.mark.parametrize(
    ("config", "tensors", "key"),
    [
        ({"modules_to_save": ["lm_head"]}, factors(), "peft_config.modules_to_save"),
        ({"alpha_pattern": {"up_proj": 4}}, factors(), "peft_config.alpha_pattern"),
        ({"bias": "all"}, factors(), "peft_config.bias"),
        ({}, factors()[:1], MODULE),
        ({}, [tensor("model.norm.weight", 8)], "base_model.model.model.norm.weight"),
        ({}, factors(rank=0), f"base_model.model.{MODULE}.lora_A.weight"),
    ],
)
def test_what_would_be_merged_otherwise_is_refused(config, tensors, key):
    with refused("adapter-invalid", key):
        adapter_plan(PeftConfig(lora_alpha=8, **config), tensors, MODEL)
