"""Two real learner ranks with a fence between them, of which one is killed while the other sends weights."""

import signal
import sys
import time
from pathlib import Path

import pytest

from conformance.cli.started import two_ranks
from rollmatch.journal import read_journal

SCRIPT = Path(__file__).with_name("dying_rank.py")
PROCESS_GROUP_TIMEOUT_S = 20


def run_two(folder):
    """Exit codes, and the seconds that rank 0 went on after rank 1 had ended."""
    with two_ranks(folder, sys.executable, str(SCRIPT), str(folder), str(PROCESS_GROUP_TIMEOUT_S)) as ranks:
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
