"""A weight that is merged block by block of rows is bit for bit the one that is merged at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from conformance.doubles.refusals import refused
from rollmatch.model import merge
from rollmatch.model.merge import LoraFactors, merge_weight
from rollmatch.weights.plan import Merge
from rollmatch.weights.worker.merging import merge_named


@pytest.fixture(autouse=True, scope="module")
def _small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "_BLOCK", 512)
        yield


@given(
    rows=st.integers(0, 70),
    columns=st.integers(1, 130),
    rank=st.integers(1, 9),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    is_dora=st.booleans(),
    is_half=st.booleans(),
    seed=st.integers(0, 9),
)
def test_blocks_of_rows_change_no_bit(rows, columns, rank, dtype, is_dora, is_half, seed):
    """``is_half``: of the adapter."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    kind = torch.bfloat16 if is_half else torch.float32
    factors = LoraFactors(
        lora_a=torch.randn(rank, columns, generator=generator).to(kind),
        lora_b=torch.randn(rows, rank, generator=generator).to(kind),
        magnitude=torch.rand(rows, generator=generator).to(kind) if is_dora else None,
        scaling=0.5,
    )
    at_once = merge._merge_whole(weight, factors)
    assert torch.equal(merge_weight(weight, factors), at_once)
    assert torch.equal(merge_weight(weight, factors, out=torch.empty_like(weight)), at_once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_adapter_in_half_precision_is_multiplied_as_peft_does(dtype):
    rules = LoraConfig(target_modules=["0"], r=5, lora_alpha=3, init_lora_weights=False)
    base = torch.nn.Sequential(torch.nn.Linear(33, 20)).to(dtype)
    layer = get_peft_model(base, rules, autocast_adapter_dtype=False).base_model.model[0]
    lora_a, lora_b = (matrices["default"].weight for matrices in (layer.lora_A, layer.lora_B))
    factors = LoraFactors(lora_a=lora_a, lora_b=lora_b, magnitude=None, scaling=layer.scaling["default"])
    assert torch.equal(merge_weight(layer.weight, factors), layer.weight + layer.get_delta_weight("default"))


@pytest.mark.parametrize("rows_of_b", [1, 7, 9])
def test_an_adapter_of_another_model_is_refused_by_the_weights_name(rows_of_b):
    tensors = {"a": torch.zeros(2, 4), "b": torch.zeros(rows_of_b, 2)}
    planned = Merge(name="layers.0.q_proj.weight", lora_a="a", lora_b="b", scaling=1.0)
    with refused("adapter-invalid", planned.name, problem=str(rows_of_b), remedy="the adapter of this model"):
        merge_named(planned, torch.zeros(8, 4), tensors)


@pytest.mark.parametrize(
    ("part", "shape"), [("lora_a", (2, 3)), ("lora_a", (3, 4)), ("lora_b", (7, 2)), ("magnitude", (7,))]
)
def test_each_part_of_an_adapter_has_to_fit(part, shape):
    fitting = {"lora_a": torch.zeros(2, 4), "lora_b": torch.zeros(8, 2), "magnitude": torch.ones(8)}
    merge_weight(torch.ones(8, 4), LoraFactors(**fitting, scaling=1.0))
    with pytest.raises(RuntimeError, match="does not fit a weight of"):
        merge_weight(torch.ones(8, 4), LoraFactors(**fitting | {part: torch.ones(shape)}, scaling=1.0))
