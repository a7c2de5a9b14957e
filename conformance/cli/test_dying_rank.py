"""Two real learner ranks with a fence between them, of which one is killed while the other sends weights."""

import os
import signal
import time
from pathlib import Path

import pytest

from conformance.cli.forked import LEARNER, Forked
from conformance.cli.started import RANKED
from conformance.server.instance import free_port
from rollmatch.journal import read_journal

SCRIPT = Path(__file__).with_name("dying_rank.py")
PROCESS_GROUP_TIMEOUT_S = 20


def start(folder, port, rank):
    """A rank without torchrun, which would end the others itself."""
    environment = {name: value for name, value in os.environ.items() if name not in RANKED} | {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    words = [str(SCRIPT), str(folder), str(PROCESS_GROUP_TIMEOUT_S)]
    return Forked(words, loaded=LEARNER, log=folder / f"told{rank}.txt", environment=environment)


def run_two(folder):
    """Exit codes, and the seconds that rank 0 went on after rank 1 had ended."""
    port = free_port()
    ranks = [start(folder, port, rank) for rank in (0, 1)]
    try:
        codes = [0, ranks[1].wait(timeout=120)]
        began = time.monotonic()
        codes[0] = ranks[0].wait(timeout=PROCESS_GROUP_TIMEOUT_S + 40)
        return codes, time.monotonic() - began
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.scenario(
    "learner-ranks/a-rank-dies-between-the-barriers", clauses=["learner-ranks/a-failed-sync-fails-on-every-rank#3"]
)
def test_a_rank_that_dies_between_the_barriers_ends_the_other_one_soon(tmp_path):
    (code, code_of_dead), seconds = run_two(tmp_path)
    assert code_of_dead == -signal.SIGKILL
    assert (tmp_path / "pushing2-0").exists()
    assert code == 1, (tmp_path / "told0.txt").read_text()
    assert seconds <= 30
    for rank in (0, 1):
        events = [(event["event"], event["step"]) for event in read_journal(tmp_path / f"journal{rank}.jsonl")]
        assert events == [("synced", 0)], "the step in which both live"
