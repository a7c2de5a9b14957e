"""Without a GPU, too, no pass takes more memory than it may: measured on this process."""

import resource

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollmatch.learn.checkpointing import AdaptiveCheckpointing
from rollmatch.learn.memory import HostMemory, container_limits

MIB = 2**20
NUM_TOKENS, NUM_LAYERS = 1024, 6


class SmallMachine(HostMemory):
    """This machine's memory, of which the process may take ``most`` bytes."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def room(self, share):
        return self.most - self.allocated()


def make_model():
    """Some 30 MiB of activations a layer, for all tokens."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def learn(model, memory):
    """One forward and backward pass; returns its peak."""
    ids = (torch.arange(NUM_TOKENS) % 64).reshape(-1, 64)
    memory.reset_peak()
    model(input_ids=ids, use_cache=False).logits.pow(2).mean().backward()
    return memory.peak()


@pytest.mark.parametrize("room_mib", [80, 2000])
def test_layers_are_recomputed_where_the_machine_is_short_of_memory(room_mib):
    model, memory = make_model(), HostMemory()
    learn(model, memory)  # gradients are there before, as from the second step on
    most = memory.allocated() + room_mib * MIB
    checkpointing = AdaptiveCheckpointing(model, model.model.layers, share=0.9, memory=SmallMachine(most))
    peaks = [learn(model, memory) for _ in range(5)]
    if room_mib == 2000:
        assert checkpointing.num_kept == NUM_LAYERS
    else:
        assert checkpointing.num_kept < NUM_LAYERS
        assert max(peaks[2:]) < most + 30 * MIB


def test_a_peak_ends_with_the_next_one():
    memory = HostMemory()
    before = memory.allocated()
    memory.reset_peak()
    held = torch.ones(50 * MIB)
    del held
    assert memory.peak() - before > 150 * MIB
    memory.reset_peak()
    is_reset = memory.peak() - before < 100 * MIB
    assert is_reset or memory.peak() <= 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({}, []),
        ({"memory.max": "max", "memory.current": "5"}, []),
        ({"memory.max": "900\n", "memory.current": "500\n"}, [(900, 500)]),
        ({"memory/memory.limit_in_bytes": "800", "memory/memory.usage_in_bytes": "100"}, [(800, 100)]),
    ],
)
def test_a_container_may_have_less_than_the_machine(tmp_path, files, limits):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container_limits(tmp_path) == limits
