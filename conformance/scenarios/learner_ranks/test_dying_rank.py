"""Two real learner ranks with a fence between them, of which one is killed while the other sends weights.

As a script (``FOLDER TIMEOUT_S``) it is such a rank, without an engine: both push between the two barriers; in step 1
rank 1 is killed there, by itself.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conformance.doubles.started import started_ranks
from rollmatch.journal import Journal, read_journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import RolloutBackend
from rollmatch.rollout.fence import Fence

SCRIPT = Path(__file__)
PROCESS_GROUP_TIMEOUT_S = 20


def run_two(folder):
    """Exit codes, and the seconds that rank 0 continued after rank 1 had ended."""
    with started_ranks(folder, 2, sys.executable, str(SCRIPT), str(folder), str(PROCESS_GROUP_TIMEOUT_S)) as ranks:
        code_of_dead = ranks[1].wait()
        began = time.monotonic()
        return [ranks[0].wait(), code_of_dead], time.monotonic() - began


@pytest.mark.scenario(
    "learner-ranks/a-rank-dies-between-the-barriers", clauses=["learner-ranks/a-failed-sync-fails-on-every-rank#3"]
)
def test_a_rank_that_dies_between_the_barriers_ends_the_other_one_soon(tmp_path):
    (code, code_of_dead), seconds = run_two(tmp_path)
    assert code_of_dead == -signal.SIGKILL
    assert (tmp_path / "pushing2-0").exists()
    assert code == 1, (tmp_path / "rank0.txt").read_text()
    assert seconds <= 30
    for rank in (0, 1):
        events = [(event["event"], event["step"]) for event in read_journal(tmp_path / f"journal{rank}.jsonl")]
        assert events == [("synced", 0)], "the step in which both live"


class Pushing(RolloutBackend):
    """Takes weights for half a second."""

    policy_version = 0

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def generate(self, requests, decoding):
        raise NotImplementedError

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
