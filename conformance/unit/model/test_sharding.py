"""Weights that ranks hold in parts: gradients in FSDP2's exchange of the whole model, sizes under ZeRO-3."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from conformance.doubles.digits import load_model, requests_for, scenes, template_of
from conformance.doubles.started import finish_ranks
from rollmatch.model.policy import LARGE_VOCABULARY, count_weights, head_worth_avoiding
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.hf import HfBackend

GATHERED = """
import random
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from rollmatch.model import sharding

dist.init_process_group("gloo")
calls, gather = [], dist.all_gather_into_tensor
dist.all_gather_into_tensor = lambda *given, **named: calls.append(given[1]) or gather(*given, **named)
mesh, chance = init_device_mesh("cpu", (dist.get_world_size(),)), random.Random(0)
for _ in range(40):
    shapes = [[chance.randint(1, 7) for _ in range(chance.randint(1, 3))] for _ in range(chance.randint(0, 12))]
    plain = [torch.randn(shape).to(chance.choice([torch.float32, torch.bfloat16])) for shape in shapes]
    for weight in plain:
        dist.broadcast(weight, 0)
    ways = [chance.choice([Shard(0), Shard(0), Shard(0), Shard(len(shape) - 1), Replicate(), None]) for shape in shapes]
    split = [distribute_tensor(w, mesh, [way]) if way else w for w, way in zip(plain, ways)]
    sharding.GATHER_BYTES = {"cpu": chance.choice([1, 200, 2**22])}
    types = [chance.choice([weight.dtype, torch.float16]) for weight in plain]
    whole = list(sharding.each_whole(zip(split, types, strict=True)))
    expected = [weight.to(dtype) if way == Shard(0) else weight for weight, dtype, way in zip(plain, types, ways)]
    assert [w.dtype for w in whole] == [w.dtype for w in expected]
    assert all(map(torch.equal, whole, expected)), (shapes, ways)
    assert not any(isinstance(w, DTensor) for w in whole)
    firsts = list(sharding.each_whole(zip(split, types, strict=True), to_first=True))
    assert [(w.dtype, w.shape) for w in firsts] == [(w.dtype, w.shape) for w in expected]
    if dist.get_rank() == 0:
        assert all(map(torch.equal, firsts, expected)), (shapes, ways)
    else:
        assert [w.is_meta for w in firsts] == [way == Shard(0) for way in ways]
assert calls
calls.clear()
weights = [(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]), torch.bfloat16) for _ in range(9)]
sharding.GATHER_BYTES = {"cpu": 4 * 48}
assert len(list(sharding.each_whole(weights))) == 9
assert [len(call) * dist.get_world_size() for call in calls] == [4 * 48, 4 * 48, 48], calls
calls.clear()
own = [(weight, dtype) for weight, _ in weights[:2] for dtype in (torch.bfloat16, torch.float64)]
sharding.GATHER_BYTES = {"cpu": 2 * (48 + 192)}
assert [weight.dtype for weight in sharding.each_whole(own)] == [torch.bfloat16, torch.float64] * 2
assert len(calls) == 1  # of several types, as bytes
dist.destroy_process_group()
"""


def test_weights_that_are_gathered_together_are_whole_and_in_order_on_all_ranks_or_the_first(tmp_path):
    script = tmp_path / "gathered.py"
    script.write_text(GATHERED)
    finish_ranks(tmp_path, 3, sys.executable, str(script))


def test_weights_of_which_this_rank_holds_nothing_now_have_their_whole_size():
    head = nn.Linear(2, LARGE_VOCABULARY)
    model = nn.Module()
    model.get_output_embeddings = lambda: head
    for weight in head.parameters():
        weight.ds_shape, weight.data = weight.shape, torch.empty(0)
    assert count_weights(head) == (3 * LARGE_VOCABULARY,) * 2
    assert head_worth_avoiding(model) is head


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_rank_with_less_to_write_takes_part_in_the_passes_of_the_others(monkeypatch, is_sharded):
    model, passes = load_model(), []
    generate = model.generate
    model.generate = lambda *given, synced_gpus, **named: passes.append(synced_gpus) or generate(*given, **named)
    monkeypatch.setattr("rollmatch.rollout.hf.is_sharded", lambda _: is_sharded)
    ranks = SimpleNamespace(learner_world_size=2, gather=lambda num_batches: [num_batches, 3])
    backend = HfBackend(model, template_of(), batch_size=2, ranks=ranks)
    backend.generate(requests_for(scenes()[:2]), Decoding(max_new_tokens=2))
    assert passes == ([True] * 3 if is_sharded else [False])
