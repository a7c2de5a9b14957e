"""A learner rank with sharded weights and no engine: ``torchrun ... ranks_of_learner.py URL PORT FOLDER``.

Syncs and asks for rollouts at step 0 and again (no sync due), trains a step, does both at step 1; at step 2 the server
refuses. Writes what it saw to FOLDER/rankR.json and the gathered weights of step 1 beside it. ``peak_bytes`` is the
most memory in gathered and merged weights at a time.
"""

import json
import sys
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from conformance.dialects.learner_side import TEMPLATE, connected, rendezvous
from conformance.doubles.adapters import perturb_adapters
from conformance.doubles.records import make_request
from conformance.doubles.tiny_qwen3_vl import make_tiny_qwen3
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.errors import RollmatchError
from rollmatch.model import checkpoint, sharding
from rollmatch.ranks import Journal, Ranks
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.fence import Fence
from rollmatch.rollout.vllm_server import VllmServerBackend
from rollmatch.weights.named_weights import named_weights

REFUSE_AT = 2


BUCKET_BYTES = 2**16


def make_model():
    """Eight layers with adapters on every linear layer, which learn."""
    torch.manual_seed(0)
    model = get_peft_model(make_tiny_qwen3(num_layers=8), LoraConfig(r=2, target_modules="all-linear"))
    return perturb_adapters(model)


def split(model):
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    return fully_shard(model)


def train(model):
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    ids = torch.arange(20, 36)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


class LiveBytes:
    """Memory of what functions return, or generators yield, as long as anybody holds it."""

    def __init__(self):
        self.now = self.peak = 0
        self._known = set()

    def counting(self, make):
        def counted(*args, **kwargs):
            made = make(*args, **kwargs)
            return list(map(self._counted, made)) if isinstance(made, list) else self._counted(made)

        return counted

    def counting_each(self, make):
        return lambda *args, **kwargs: map(self._counted, make(*args, **kwargs))

    def _counted(self, made):
        if made.is_meta:
            return made
        storage = made.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if address not in self._known:
            self._known.add(address)
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, address, num_bytes)
        return made

    def _free(self, address, num_bytes):
        self._known.discard(address)
        self.now -= num_bytes


def make_fence(url, port, folder, ranks):
    server = connected(url)
    sender = (
        NativeSender([server], rendezvous(port=port), bucket_bytes=BUCKET_BYTES, stage=False)
        if ranks.is_primary
        else None
    )
    backend = VllmServerBackend([server], TEMPLATE, ranks, sender=sender)
    return Fence(backend, ranks, Journal(folder / f"journal-rank{ranks.rank}.jsonl", rank=ranks.rank))


def roll_out(fence, model, step):
    """As the trainer does: sync if due, then ask; the seconds that the sync took."""
    seconds = fence.sync_if_due(step, lambda: named_weights(model))
    request = make_request(request_id=f"{step}.{fence.ranks.rank}.0", prompt_token_ids=(1, 2, 3))
    (rollout,) = fence.backend.generate([request], Decoding(max_new_tokens=4))
    return {"step": step, "synced": seconds > 0, "version": rollout.policy_version, "ids": rollout.response_token_ids}


def main(url, port, folder):
    dist.init_process_group("gloo")
    ranks = Ranks.from_environment()
    model, live = split(make_model()), LiveBytes()
    DTensor.full_tensor = live.counting(DTensor.full_tensor)
    sharding._empty_on_first = live.counting(sharding._empty_on_first)
    sharding._taken_apart = live.counting(sharding._taken_apart)
    checkpoint.each_whole = live.counting_each(checkpoint.each_whole)
    sharding.GATHER_BYTES = {"cpu": BUCKET_BYTES // 4}
    checkpoint._merged = live.counting(checkpoint._merged)
    fence, saw = make_fence(url, int(port), folder, ranks), {"events": []}
    for step in (0, 0, 1):
        if step == 1:
            train(model)
        saw["events"].append(roll_out(fence, model, step))
    saw["peak_bytes"], saw["left_bytes"] = live.peak, live.now
    save_file(dict(named_weights(model)), folder / f"rank{ranks.rank}.safetensors")
    (folder / f"ready{ranks.rank}").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)
    began = time.monotonic()
    try:
        roll_out(fence, model, REFUSE_AT)
    except RollmatchError as error:
        saw["error"] = {"code": error.code, "key": error.key, "problem": error.problem}
    saw["seconds"] = time.monotonic() - began
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(saw))
    fence.backend.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], Path(sys.argv[3]))
