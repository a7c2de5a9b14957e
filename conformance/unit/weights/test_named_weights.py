"""All weights by checkpoint name, adapters merged; or the adapter alone, with what it takes to merge and prove it."""

import pytest
import torch

from conformance.doubles.adapters import adapted
from conformance.doubles.refusals import refused
from conformance.doubles.tiny_qwen3_vl import make_tiny_qwen3, make_tiny_qwen3_vl
from rollmatch.model.checkpoint import merged_weights
from rollmatch.weights.named_weights import adapter_of, named_weights


def merge_by_hand(base, merge, tensors):
    """LoRA and DoRA as their papers write them, in float64."""
    a, b, w = (t.double() for t in (tensors[merge.lora_a], tensors[merge.lora_b], base))
    total = w + merge.scaling * b @ a
    if merge.magnitude is None:
        return total
    return tensors[merge.magnitude].double()[:, None] * total / total.norm(dim=1, keepdim=True)


def test_weights_that_have_to_be_merged_are_listed_before():
    policy = adapted()
    assert [spec.name for spec in named_weights(policy).specs()] == [name for name, _ in named_weights(policy)]
    assert named_weights(make_tiny_qwen3_vl()).specs() is None, "all are in memory: they may go in any order"


def test_weights_are_read_when_iterated_over():
    model = make_tiny_qwen3()
    weights = named_weights(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    assert dict(weights)["model.norm.weight"].eq(3.0).all()


def test_a_ddp_wrapper_is_taken_off():
    class Wrapped(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, module):
            torch.nn.Module.__init__(self)
            self.module = module

    names = dict(named_weights(Wrapped(make_tiny_qwen3()))).keys()
    assert names == dict(make_tiny_qwen3().named_parameters()).keys()


@pytest.mark.parametrize("use_dora", [False, True])
def test_reading_weights_leaves_the_policy_as_it_is(use_dora):
    policy = adapted(use_dora=use_dora)
    before = {name: weight.clone() for name, weight in policy.named_parameters()}
    iterator = iter(named_weights(policy))
    next(iterator)
    iterator.close()  # a sync that failed after its first tensor
    list(named_weights(policy))
    adapter_of(policy)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.named_parameters())


@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_holds_what_it_takes_to_merge_it(use_dora):
    policy = adapted(use_dora=use_dora)
    adapter, base = adapter_of(policy), dict(make_tiny_qwen3_vl().named_parameters())
    tensors = dict(adapter.tensors)
    merged = dict(zip((merge.name for merge in adapter.merges), adapter.merged, strict=True))
    assert len(adapter.merges) > 6
    assert any("visual" in name for name in merged)
    for merge in adapter.merges:
        assert (merge.magnitude is not None) == use_dora
        expected = merge_by_hand(base[merge.name].detach(), merge, tensors)
        assert torch.allclose(merged[merge.name].double(), expected, atol=1e-5)
    everything = dict(merged_weights(policy))
    assert all(torch.equal(everything[name], weight) for name, weight in merged.items())
    assert all(torch.equal(everything[name], base[name]) for name in everything.keys() - merged.keys())


def test_an_adapter_is_smaller_than_the_policy():
    adapter = adapter_of(adapted())
    num_sent = sum(tensor.numel() for _, tensor in adapter.tensors)
    assert num_sent == sum(p.numel() for n, p in adapted().named_parameters() if "lora_" in n)


def test_without_an_adapter_there_is_none_to_send():
    with refused("adapter-missing", "tuner.train_type"):
        adapter_of(make_tiny_qwen3())
    assert adapter_of(adapted(model=make_tiny_qwen3())).merges


def test_weights_that_learn_beside_the_adapter_are_refused():
    policy = adapted(model=make_tiny_qwen3())
    norm = policy.get_submodule("base_model.model.model.norm").weight
    norm.requires_grad_(True)
    with refused("adapter-incomplete", "model.norm.weight"):
        adapter_of(policy)
    norm.requires_grad_(False)
    assert adapter_of(policy).merges
