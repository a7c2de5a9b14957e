"""One rank of a small run; writes its weights and its log below a folder: ``ddp_worker.py TASK FOLDER OVERRIDE...``

With CHECKPOINT set it continues from there.

Its loss is scored in the head, inside what DDP or FSDP2 wraps; the single rank that it is compared with scores logits.
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from conformance.trainer import small_run, turns
from conformance.trainer.small_run import weights_of
from rollmatch.learn import loss_in_head


def main(task: str, folder: Path, *overrides: str, checkpoint: str | None = None) -> None:
    loss_in_head.LARGE_VOCABULARY = 0
    trainer = {"digits": small_run, "turns": turns, "episodes": turns}[task].make_trainer(folder, *overrides)
    metrics = trainer.evaluate()
    trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer.scoring.head is not None
    is_split = any(isinstance(weight, DTensor) for weight in trainer.model.parameters())
    assert is_split == ("training.strategy=fsdp2" in overrides)
    rank = trainer.source.ranks.rank
    save_file(weights_of(trainer.model), folder / f"rank{rank}.safetensors")
    log = {"losses": [line["loss"] for line in trainer.state.log_history if "loss" in line], "metrics": metrics}
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
