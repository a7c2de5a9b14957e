"""As many layers keep their activations as fit; what they learn stays the same."""

import pytest
import torch

from conformance.doubles.models import assert_same_gradients, gradients
from conformance.doubles.tiny_qwen3_vl import make_tiny_qwen3
from rollmatch.learn.checkpointing import AdaptiveCheckpointing

WEIGHTS, PER_TOKEN, PER_LAYER = 1_000_000, 500, 2_000


class SimulatedMemory:
    """A device of ``total`` bytes on which a pass of T tokens with k layers kept takes T * (500 + 2,000 k)."""

    def __init__(self, total):
        self.total, self.stored, self.highest = total, 0, 0

    def allocated(self):
        return WEIGHTS + self.stored

    def peak(self):
        return WEIGHTS + self.highest

    def reset_peak(self):
        self.highest = 0

    def room(self, share):
        return int(share * self.total) - self.allocated()

    def run(self, checkpointing, model, num_tokens):
        """One forward and backward pass; returns its peak."""
        ids = torch.arange(num_tokens)[None] % 50
        handle = checkpointing.layers[-1].register_forward_hook(
            lambda *_: self.store(num_tokens * PER_LAYER * checkpointing.num_kept)
        )
        loss = model(input_ids=ids, use_cache=False).logits.pow(2).mean()
        handle.remove()
        self.highest = max(self.highest, self.stored + num_tokens * PER_TOKEN)
        peak = self.allocated() + num_tokens * PER_TOKEN
        loss.backward()
        self.stored = 0
        return peak

    def store(self, num_bytes):
        self.stored = num_bytes


@pytest.fixture
def model():
    made = make_tiny_qwen3(num_layers=12).train()
    made.gradient_checkpointing_enable({"use_reentrant": False})
    return made


def kept(model):
    return [not layer.gradient_checkpointing for layer in model.model.layers]


def test_all_layers_are_kept_where_all_fit(model):
    memory = SimulatedMemory(10**9)
    memory.highest = 10**9  # while the weights were loaded
    checkpointing = AdaptiveCheckpointing(model, model.model.layers, share=0.9, memory=memory)
    numbers = []
    for _ in range(5):
        memory.run(checkpointing, model, 40)
        numbers.append(checkpointing.num_kept)
    assert numbers == [0, 2, 8, 12, 12]
    assert all(kept(model))
    ids = torch.zeros(1, 400, dtype=torch.int64)
    with torch.no_grad():
        model(input_ids=ids)
    model.eval()(input_ids=ids)
    assert checkpointing.num_kept == 12, "evaluation and scoring change nothing"


def test_closed_it_leaves_the_model_alone(model):
    checkpointing = AdaptiveCheckpointing(model, model.model.layers, share=0.9, memory=SimulatedMemory(10**9))
    checkpointing.close()
    model(input_ids=torch.arange(40)[None]).logits.sum().backward()
    assert checkpointing.num_kept == 0
    assert not any(kept(model))


@pytest.mark.parametrize("num_fitting", [0, 1, 5, 11])
def test_no_pass_takes_more_than_its_share(model, num_fitting):
    share, num_tokens = 0.9, 40
    needed = WEIGHTS + num_tokens * (PER_TOKEN + PER_LAYER * (num_fitting + 0.5))
    memory = SimulatedMemory(int(needed / share))
    checkpointing = AdaptiveCheckpointing(model, model.model.layers, share=share, memory=memory)
    for _ in range(6):
        memory.run(checkpointing, model, num_tokens)
    assert checkpointing.num_kept == num_fitting
    assert kept(model) == [False] * (12 - num_fitting) + [True] * num_fitting


def test_a_longer_batch_keeps_fewer_layers(model):
    memory = SimulatedMemory(int((WEIGHTS + 40 * (PER_TOKEN + PER_LAYER * 8.5)) / 0.9))
    checkpointing = AdaptiveCheckpointing(model, model.model.layers, share=0.9, memory=memory)
    for num_tokens in (40, 40, 40, 40, 80, 10, 10):
        peak = memory.run(checkpointing, model, num_tokens)
        assert checkpointing.num_kept <= 2 or peak <= 0.9 * memory.total
        if num_tokens == 80:
            assert checkpointing.num_kept == 4
    assert checkpointing.num_kept == 12


def test_gradients_are_those_of_a_model_without_checkpointing(model):
    plain, ids = make_tiny_qwen3(num_layers=12).train(), torch.arange(40)[None] % 50
    checkpointing = AdaptiveCheckpointing(model, model.model.layers, share=0.9, memory=SimulatedMemory(10**9))
    checkpointing._keep(5)
    for one in (plain, model):
        one(input_ids=ids, use_cache=False).logits.pow(2).mean().backward()
    assert_same_gradients(gradients(model), gradients(plain))
