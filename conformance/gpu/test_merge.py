"""Adapters merged by one kernel on a GPU: peft's merge, rounded once, alike wherever it is done."""

import pytest
import torch

from conformance.doubles.digits import MODEL
from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.model.adapters import model_key
from rollmatch.model.checkpoint import merged_weights
from rollmatch.model.merge import AdaptedWeight, LoraFactors, merge_by_kernel, merge_weight, merges_by_kernel
from rollmatch.model.policy import load_policy

pytestmark = pytest.mark.gpu(1)


def parts_for(weight, *, rank, is_dora):
    num_out, num_in = weight.shape
    return LoraFactors(
        lora_a=torch.randn(rank, num_in, device="cuda"),
        lora_b=torch.randn(num_out, rank, device="cuda") * 0.1,
        magnitude=torch.rand(num_out, device="cuda") + 0.5 if is_dora else None,
        scaling=0.7,
    )


def exactly(weight, parts):
    summed = weight.double() + parts.lora_b.double() @ parts.lora_a.double() * parts.scaling
    if parts.magnitude is not None:
        summed *= (parts.magnitude.double() / summed.norm(dim=1))[:, None]
    return summed


@pytest.mark.parametrize("is_dora", [False, True])
@pytest.mark.parametrize("rank", [1, 16, 48])
@pytest.mark.parametrize("shape", [(96, 64), (1000, 333), (4096, 4096)])
def test_the_sum_is_rounded_once(shape, rank, is_dora):
    torch.manual_seed(rank)
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    parts = parts_for(weight, rank=rank, is_dora=is_dora)
    assert merges_by_kernel(weight, parts)
    merged, exact = merge_weight(weight, parts), exactly(weight, parts)
    assert (merged != exact.to(torch.bfloat16)).float().mean() < 2e-3
    torch.testing.assert_close(merged.double(), exact, rtol=2**-8, atol=1e-6)
    out = torch.empty_like(weight)
    assert merge_weight(weight, parts, out=out) is out
    assert torch.equal(out, merged)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_merged_together_are_those_merged_alone(dtype):
    """Digests of a learner, which merges one after the other, are compared with those of a server, which does not."""
    torch.manual_seed(5)
    shapes, merges = [(37, 300), (1024, 4096), (64, 4096), (128, 333)], []
    for shape in shapes:
        for is_dora in (False, True):
            weight = torch.randn(shape, device="cuda", dtype=dtype)[1:]  # 333 columns are not aligned
            parts = parts_for(weight, rank=16 if shape[1] == 4096 else 3, is_dora=is_dora)
            merges.append(AdaptedWeight(weight, parts, torch.zeros_like(weight)))
    merge_by_kernel(merges)
    for weight, parts, out in merges:
        assert torch.equal(out, merge_weight(weight, parts))


def test_parts_that_do_not_fit_are_refused():
    weight = torch.zeros(8, 8, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="does not fit"):
        merge_weight(weight, parts_for(weight[:4], rank=2, is_dora=False))


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_policy_merges_as_peft_does_but_for_the_rounding(use_dora):
    torch.manual_seed(3)
    tuner = TunerConfig(train_type="lora", use_dora=use_dora, lora_rank=4)
    model = load_policy(ModelConfig(model=str(MODEL), torch_dtype="bfloat16"), tuner).cuda()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                assert weight.dtype == torch.float32
                weight.normal_(std=0.05)
    ours = dict(merged_weights(model))
    model.merge_adapter()
    theirs = {model_key(name): weight for name, weight in model.named_parameters() if "lora_" not in name}
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight.float(), theirs[name].float(), rtol=2**-7, atol=1e-6)
