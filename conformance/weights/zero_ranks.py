"""A learner rank whose weights DeepSpeed has split: ``torchrun ... zero_ranks.py STAGE URL PORT FOLDER``.

The digits model with LoRA: syncs at step 0, trains a step, syncs again. Writes to FOLDER, per rank, merged weights:
before DeepSpeed got the model and as gathered (``0``), after the step as one process takes it and as gathered (``1``).
"""

import copy
import os
import sys
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu"}

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from conformance.dialects.learner_side import make_fence, roll_out
from conformance.doubles.adapters import perturb_adapters
from conformance.rollout.digits import load_model
from rollmatch.config.training import TunerConfig
from rollmatch.model.checkpoint import merged_weights
from rollmatch.ranks import Ranks
from rollmatch.weights.named_weights import named_weights

LEARNING_RATE = 0.001


def make_policy():
    """With adapters that do something, the same ones on every rank."""
    torch.manual_seed(0)
    policy = load_model(TunerConfig(train_type="lora", lora_rank=2)).train()
    return perturb_adapters(policy, named="lora_B", by=0.02)


def loss_of(policy, rank):
    """Of tokens that every rank has others of."""
    ids = torch.arange(20, 36)[None] + rank
    return policy(input_ids=ids, labels=ids).loss


def learning(policy):
    return [weight for weight in policy.parameters() if weight.requires_grad]


def train_alone(policy, num_ranks):
    """What all ranks' step does to the policy."""
    optimizer = torch.optim.SGD(learning(policy), lr=LEARNING_RATE)
    (sum(loss_of(policy, rank) for rank in range(num_ranks)) / num_ranks).backward()
    optimizer.step()


def make_engine(policy, stage, num_ranks):
    config = {
        "train_batch_size": num_ranks,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(learning(policy), lr=LEARNING_RATE)
    return deepspeed.initialize(model=policy, optimizer=optimizer, config=config)[0]


def save(weights, folder, name):
    save_file({key: weight.contiguous() for key, weight in weights}, folder / f"{name}.safetensors")


def main(stage, url, port, folder):
    deepspeed.init_distributed(dist_backend="gloo")
    ranks = Ranks.from_environment()
    policy = make_policy()
    save(merged_weights(policy), folder, f"plain0-rank{ranks.rank}")
    alone = copy.deepcopy(policy)
    train_alone(alone, dist.get_world_size())
    save(merged_weights(alone), folder, f"plain1-rank{ranks.rank}")
    engine = make_engine(policy, int(stage), dist.get_world_size())
    fence = make_fence(url, int(port), folder, ranks)
    for step in (0, 1):
        if step == 1:
            engine.backward(loss_of(engine, ranks.rank))
            engine.step()
        roll_out(fence, engine, step)
        save(named_weights(engine), folder, f"gathered{step}-rank{ranks.rank}")
        (folder / f"split{step}-rank{ranks.rank}").write_text(str(named_weights(engine.module).is_sharded))
    fence.backend.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
