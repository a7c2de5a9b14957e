"""Two real gloo processes exchange what they know; a process alone needs no torch.distributed."""

import json
import sys

import pytest

from conformance.doubles.ranks import together
from conformance.doubles.started import finish_ranks
from rollmatch.errors import RolloutError
from rollmatch.ranks import Ranks
from rollmatch.rollout.source import settle

SCRIPT = """
import json, pathlib, sys, time
import torch.distributed as dist
from rollmatch.ranks import Ranks

folder, ranks = pathlib.Path(sys.argv[1]), Ranks.from_environment()
dist.init_process_group("gloo")
results = {"place": [ranks.rank, ranks.learner_world_size, ranks.is_primary]}
results["sum"] = ranks.sum([[1.0, 2.0**40], [2.0**-40, 0.5]][ranks.rank])
results["gather"] = ranks.gather([{"rank": ranks.rank}, None][ranks.rank])
if ranks.rank == 1:
    time.sleep(0.3)
    (folder / "late").touch()
ranks.barrier()
results["waited"] = (folder / "late").exists()
(folder / f"rank{ranks.rank}.json").write_text(json.dumps(results))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two ranks saw."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "results.py").write_text(SCRIPT)
    finish_ranks(folder, 2, sys.executable, str(folder / "results.py"), str(folder))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_a_rank_knows_its_place(results):
    assert [each["place"] for each in results] == [[0, 2, True], [1, 2, False]]


def test_a_sum_is_the_same_on_all_ranks_and_exact_in_float64(results):
    assert [each["sum"] for each in results] == [[1.0 + 2.0**-40, 2.0**40 + 0.5]] * 2


def test_gathered_items_come_in_rank_order_on_every_rank(results):
    assert [each["gather"] for each in results] == [[{"rank": 0}, None]] * 2


def test_nobody_passes_a_barrier_before_the_last_has_come(results):
    assert [each["waited"] for each in results] == [True, True]


def test_a_plain_process_is_rank_0_of_1(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Ranks.from_environment() == Ranks(rank=0, learner_world_size=1)
    assert Ranks.from_environment().is_primary


def test_a_rank_alone_exchanges_with_itself():
    alone, item = Ranks(), object()
    alone.barrier()
    assert alone.sum((0.1, 2**60)) == [0.1, 2**60]
    assert alone.gather(item) == [item]


def test_a_rank_that_did_not_fail_names_the_first_one_that_did():
    def attempt(rank):
        if rank:
            raise RolloutError(("too hot", "too cold")[rank - 1], code="odd", key="x")

    def run(member):
        with pytest.raises(RolloutError) as caught:
            settle(lambda: attempt(member.rank), ranks=member, fence=None, journal=None)
        return caught.value.code, caught.value.key, caught.value.problem

    first, *failed = together(3, run)
    assert first[:2] == ("rank-failed", "rollout")
    assert first[2].startswith("rank 1: ")
    assert "too hot" in first[2]
    assert failed == [("odd", "x", "too hot"), ("odd", "x", "too cold")]
