"""A learner rank with a real fence and no engine: ``python dying_rank.py FOLDER DIES TIMEOUT_S``.

Both push between the two barriers; the rank that dies is killed there, by itself.
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
from rollmatch.sync.fence import Fence


class Pushing:
    """Takes weights for half a second, and does not live through it if this rank dies."""

    policy_version = 0

    def __init__(self, folder: Path, rank: int, *, dies: bool) -> None:
        self.folder, self.rank, self.dies = folder, rank, dies

    def push(self, weights, *, version):
        list(weights)
        (self.folder / f"pushing{self.rank}").touch()
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        self.policy_version = version


def main(folder: Path, dies: int, timeout_s: float) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    ranks = Ranks.from_environment()
    journal = Journal(folder / f"journal{ranks.rank}.jsonl", rank=ranks.rank)
    fence = Fence(Pushing(folder, ranks.rank, dies=ranks.rank == dies), ranks, journal)
    fence.sync_if_due(0, lambda: [("a", torch.ones(2))])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
