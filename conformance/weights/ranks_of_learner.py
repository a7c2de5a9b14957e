"""A learner rank with sharded weights and no engine: ``torchrun ... ranks_of_learner.py URL PORT FOLDER``.

Syncs and asks for rollouts at step 0 and again (no sync due), trains a step, does both at step 1; at step 2 the server
refuses. Writes what it saw to FOLDER/rankR.json and the gathered weights of step 1 beside it.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from conformance.dialects.learner_side import TEMPLATE, connected, rendezvous
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.errors import RollmatchError
from rollmatch.journal import Journal
from rollmatch.ranks import Ranks
from rollmatch.records import RolloutRequest, Sample
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.fence import Fence
from rollmatch.rollout.vllm_server import VllmServerBackend
from rollmatch.weights.named_weights import named_weights

SAMPLE = Sample(sample_id=0, origin="x:1", images=(), objects=(), width=8, height=8)
REFUSE_AT = 2


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(3, 2, bias=False))


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()


def make_fence(url, port, folder, ranks):
    server = connected(url)
    sender = NativeSender([server], rendezvous(port=port), bucket_bytes=40) if ranks.is_primary else None
    backend = VllmServerBackend([server], TEMPLATE, ranks, sender=sender)
    return Fence(backend, ranks, Journal(folder / f"journal-rank{ranks.rank}.jsonl", rank=ranks.rank))


def roll_out(fence, model, step):
    """As the trainer does: sync if due, then ask; the seconds that the sync took."""
    seconds = fence.sync_if_due(step, lambda: named_weights(model))
    request = RolloutRequest(
        request_id=f"{step}.{fence.ranks.rank}.0", sample=SAMPLE, prompt_token_ids=(1, 2, 3), seed=1
    )
    (rollout,) = fence.backend.generate([request], Decoding(max_new_tokens=4))
    return {"step": step, "synced": seconds > 0, "version": rollout.policy_version, "ids": rollout.response_token_ids}


def main(url, port, folder):
    dist.init_process_group("gloo")
    ranks = Ranks.from_environment()
    model = make_model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    fence, saw = make_fence(url, int(port), folder, ranks), {"events": []}
    for step in (0, 0, 1):
        if step == 1:
            train(model)
        saw["events"].append(roll_out(fence, model, step))
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
