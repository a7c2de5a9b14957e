"""One rank of a small run; writes its weights and its log below a folder: ``ddp_worker.py TASK FOLDER OVERRIDE...``

With CHECKPOINT set it continues from there.

Its loss is scored in the head, inside what DDP or FSDP2 wraps; the single rank that it is compared with scores logits.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from conformance.doubles import small_run, turns
from conformance.doubles.digits import scenes
from conformance.doubles.small_run import weights_of
from rollmatch.learn import balance
from rollmatch.model import policy
from rollmatch.training.trainer import RolloutTrainer

OF_ALL_RANKS = ("loss_ce", "loss_coord", "f1", "recall", "segments", "rollout_tokens", "learn_tokens")
"""Figures of a step."""


def make_mixed_trainer(folder: Path, *overrides: str) -> RolloutTrainer:
    """Every other sample has no image."""
    text = {"images": (), "objects": (), "messages": (("user", "What is it?"),)}
    samples = [replace(sample, **text) if place % 2 else sample for place, sample in enumerate(scenes("train")[:8])]
    return small_run.make_trainer(folder, *overrides, samples=samples, is_shallow=True)


def make_uneven_trainer(folder: Path, *overrides: str) -> RolloutTrainer:
    """Rank 0 learns from all segments of both ranks but one, so that rank 1 runs passes without any."""

    def unevenly(costs: list[balance.Cost], *, capacity: int, num_ranks: int) -> list[list[list[int]]]:
        assert (max(costs)[0] <= capacity, num_ranks) == (True, 2)
        *most, last = ([place] for place in range(len(costs)))
        return [most, [last, *([] for _ in most[1:])]]

    balance.balance = unevenly
    return small_run.make_trainer(folder, *overrides)


def main(task: str, folder: Path, *overrides: str, checkpoint: str | None = None) -> None:
    policy.LARGE_VOCABULARY = 0
    makers = {"digits": small_run.make_trainer, "mixed": make_mixed_trainer, "uneven": make_uneven_trainer}
    make = makers.get(task, turns.make_trainer)
    trainer = make(folder, *overrides)
    metrics = trainer.evaluate()
    trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer.scoring.head is not None
    is_split = any(isinstance(weight, DTensor) for weight in trainer.model.parameters())
    assert is_split == ("training.strategy=fsdp2" in overrides)
    rank = trainer.source.ranks.rank
    save_file(weights_of(trainer.model), folder / f"rank{rank}.safetensors")
    lines = [line for line in trainer.state.log_history if "loss" in line]
    parts = [[line.get(name) for name in OF_ALL_RANKS] for line in lines]
    log = {"losses": [line["loss"] for line in lines], "parts": parts, "metrics": metrics}
    (folder / f"rank{rank}.json").write_text(json.dumps(log))
    restarts = {"calm": (), "restarted": (2, 11)} if task == "turns" else {}  # in a turn, and in a continuation's
    for name, numbers in restarts.items():
        trainer = turns.with_servers(turns.make_trainer(folder / name, *overrides), restarts=numbers)
        trainer.train()
        save_file(weights_of(trainer.model), folder / f"{name}/rank{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:], checkpoint=os.environ.get("CHECKPOINT"))
