"""A learner rank with a real fence and no engine: ``python dying_rank.py FOLDER TIMEOUT_S``.

Both push between the two barriers. In step 0 both live; in step 1 rank 1 is killed there, by itself.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rollmatch.journal import Journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.fence import Fence


class Pushing:
    """Takes weights for half a second."""

    policy_version = 0

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def push(self, weights, *, version):
        list(weights)
        (self.folder / f"pushing{version}-{self.rank}").touch()
        if (self.rank, version) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        self.policy_version = version


def main(folder: Path, timeout_s: float) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    ranks = Ranks.from_environment()
    journal = Journal(folder / f"journal{ranks.rank}.jsonl", rank=ranks.rank)
    fence = Fence(Pushing(folder, ranks.rank), ranks, journal)
    for step in (0, 1):
        fence.sync_if_due(step, lambda: [("a", torch.ones(2))])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
