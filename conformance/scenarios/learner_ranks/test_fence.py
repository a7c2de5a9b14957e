"""Weights move once per optimizer step, between two barriers, and a failed push stops every rank."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from conformance.doubles.http_server import http_server, send
from conformance.doubles.instance import free_port
from conformance.doubles.ranks import together
from conformance.doubles.swift_double import QUICK
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.errors import RollmatchError
from rollmatch.journal import Journal, read_journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import RolloutBackend
from rollmatch.rollout.fence import Fence, PushFailed
from rollmatch.rollout.members import ServerMembers
from rollmatch.weights.plan import TensorMismatch

WEIGHTS = {"a": torch.zeros(3, 2), "b": torch.ones(5, dtype=torch.bfloat16)}
FENCED = ("gather", "barrier", "push", "gather", "barrier", "go on")
"""What one rank does, in this order, when a sync is due."""


class EngineGone(Exception):
    """An error of a kind that no list of ours can know."""


@dataclass
class Backend(RolloutBackend):
    """Remembers every push; ``broken`` is raised by it."""

    note: Any = lambda event: None
    broken: BaseException | None = None
    policy_version: int = 0
    taken: list[dict[str, Any]] = field(default_factory=list)

    def generate(self, requests, decoding):
        raise NotImplementedError

    def push(self, weights, *, version):
        self.note("push")
        self.taken.append(dict(weights))
        if self.broken is not None:
            raise self.broken
        self.policy_version = version


class ThreadRanks(Ranks):
    """A rank that is a thread; ``events`` of all ranks, in the order in which they happened."""

    def __init__(self, member, events):
        super().__init__(rank=member.rank, learner_world_size=member.learner_world_size)
        for name, value in (("member", member), ("events", events)):
            object.__setattr__(self, name, value)

    def exchange(self, event, item=None):
        self.events.append((self.rank, event))
        return self.member.gather(item)

    def barrier(self):
        self.exchange("barrier")

    def gather(self, item):
        return self.exchange("gather", item)


def weights():
    return iter(WEIGHTS.items())


def sync_on_all(folder, *, broken=(), make_weights=None, **before):
    """One sync on three ranks; ``broken`` is rank -> error, ``before`` what each rank remembers.

    Returns the events and what each rank raised.
    """
    broken, events = dict(broken), []

    def sync(member):
        rank = member.rank
        backend = Backend(note=lambda event: events.append((rank, event)), broken=broken.get(rank))
        backend.policy_version = before.get("versions", (0, 0, 0))[rank]
        fence = Fence(backend, ThreadRanks(member, events), Journal(folder / f"{rank}.jsonl", rank=rank))
        fence.synced_step = before.get("remembered", (None, None, None))[rank]
        try:
            fence.sync_if_due(before.get("step", 0), (make_weights or {}).get(rank, weights))
        except (RollmatchError, EngineGone) as error:
            return error
        events.append((rank, "go on"))
        return None

    return events, together(3, sync)


def breaches(events, num_ranks=3):
    """What is wrong with the order of events, empty if a sync was fenced."""
    order = [tuple(event for rank, event in events if rank == each) for each in range(num_ranks)]
    found = [f"rank {rank} did {did}" for rank, did in enumerate(order) if did != FENCED]
    for event, before, count in (("push", "barrier", 1), ("go on", "push", 1), ("go on", "barrier", 2)):
        first = next((place for place, (_, name) in enumerate(events) if name == event), len(events))
        if sum(name == before for _, name in events[:first]) < count * num_ranks:
            found.append(f"{event} before every {before}")
    return found


@pytest.fixture
def fence(tmp_path):
    return Fence(Backend(), Ranks(), Journal(tmp_path / "journal.jsonl"))


def test_a_step_pushes_once_however_many_rollouts_it_wants(fence):
    asked = []
    for step in (0, 0, 0, 1, 1, 2):
        took = fence.sync_if_due(step, lambda: asked.append("weights") or weights()) > 0
        asked.append((step, fence.backend.policy_version, took))
    assert asked == [
        *("weights", (0, 1, True), (0, 1, False), (0, 1, False)),
        *("weights", (1, 2, True), (1, 2, False)),
        *("weights", (2, 3, True)),
    ]
    assert fence.backend.taken == [WEIGHTS] * 3


def test_a_step_that_comes_again_after_a_resume_is_another_step(fence):
    for step in (5, 3, 5):
        assert fence.sync_if_due(step, weights) > 0
    assert fence.backend.policy_version == 3


def test_the_journal_records_version_and_size_of_every_sync(fence):
    for step in (4, 4, 5):
        fence.sync_if_due(step, weights)
    events = read_journal(fence.journal.path)
    assert [(e["event"], e["step"], e["version"], e["mode"]) for e in events] == [
        *(("synced", 4, 1, "full"), ("synced", 5, 2, "full"))
    ]
    assert {(e["num_tensors"], e["num_bytes"]) for e in events} == {(2, 3 * 2 * 4 + 5 * 2)}
    assert all(e["seconds"] >= 0 for e in events)


def test_a_rank_alone_sees_the_backends_own_error_and_is_not_synced(fence):
    fence.backend.broken = KeyError("lm_head")
    with pytest.raises(KeyError):
        fence.sync_if_due(0, weights)
    assert (fence.synced_step, read_journal(fence.journal.path)) == (None, [])
    fence.backend.broken = None
    fence.sync_if_due(0, weights)
    assert (fence.synced_step, fence.backend.policy_version) == (0, 1)


@pytest.mark.scenario(
    "learner-ranks/two-ranks-pass-the-fence", clauses=["learner-ranks/a-fence-stands-between-sync-and-generation#1"]
)
def test_all_ranks_wait_push_share_their_verdict_and_wait_again(tmp_path):
    events, errors = sync_on_all(tmp_path)
    assert errors == [None] * 3
    assert breaches(events) == []


@pytest.mark.scenario(
    "learner-ranks/the-sync-of-rank-0-fails", clauses=["learner-ranks/a-failed-sync-fails-on-every-rank#2,4"]
)
@pytest.mark.parametrize(
    "error",
    [
        *(KeyError("no lm_head"), OSError("connection reset"), TypeError("of 2 arguments")),
        TensorMismatch("lm_head.weight is not there", key="lm_head.weight"),
    ],
)
def test_a_push_that_fails_on_one_rank_is_the_same_error_on_all(tmp_path, error):
    events, errors = sync_on_all(tmp_path, broken={1: error})
    assert [(type(e), e.code, e.key) for e in errors] == [(PushFailed, "push-failed", "sync")] * 3
    assert {e.problem for e in errors} == {f"rank 1: {type(error).__name__}: {error}"}
    assert [e.__cause__ for e in errors] == [None, error, None]
    assert "go on" not in {name for _, name in events}
    assert [list(read_journal(tmp_path / f"{rank}.jsonl")) for rank in range(3)] == [[]] * 3


@pytest.mark.parametrize("remembered", [(5, None, 5), (None, 5, 5), (5, 5, 4)])
def test_ranks_that_remember_different_steps_all_sync(tmp_path, remembered):
    events, errors = sync_on_all(tmp_path, step=5, remembered=remembered)
    assert errors == [None] * 3
    assert breaches(events) == []


def test_ranks_that_agree_on_the_step_do_not_sync(tmp_path):
    events, errors = sync_on_all(tmp_path, step=5, remembered=(5, 5, 5))
    assert errors == [None] * 3
    assert {name for _, name in events} == {"gather", "go on"}


@pytest.mark.parametrize("lost_by", [(0, 2), (1,), (2,)])
def test_a_server_that_only_some_ranks_know_to_be_lost_makes_no_sync_due(tmp_path, lost_by):
    """The others find a server that does not answer: the same weights were sent once more to those that had them."""

    def sync(member):
        urls = (served.url, f"http://127.0.0.1:{free_port()}")
        members = ServerMembers([RolloutServer(url, ClientSettings(timeout_s=1, watch=QUICK)) for url in urls])
        backend, members.min_servers, members.instances = Backend(), 1, {0: "a", 1: "b"}
        backend.members, backend.is_current = members, members.are_current
        if member.rank in lost_by:
            assert members.leave_out(1)
        fence = Fence(backend, ThreadRanks(member, []), Journal(tmp_path / f"{member.rank}.jsonl", rank=member.rank))
        fence.synced_step = 4
        fence.sync_if_due(4, weights)
        return backend.taken, members.present

    with http_server(lambda handler: send(handler, 200, {"status": "ok", "instance": "a"})) as served:
        assert together(3, sync) == [([], (0,))] * 3


def test_all_ranks_count_on_from_the_newest_version(tmp_path):
    sync_on_all(tmp_path, versions=(7, 2, 0))
    written = [read_journal(tmp_path / f"{rank}.jsonl") for rank in range(3)]
    assert [[e["version"] for e in events] for events in written] == [[8]] * 3


def test_an_engine_that_lost_its_weights_makes_a_sync_due(fence):
    fence.backend.is_current = lambda: True
    fence.sync_if_due(0, weights)
    assert fence.sync_if_due(0, weights) == 0
    fence.backend.is_current = lambda: False
    assert fence.sync_if_due(0, weights) > 0
    assert fence.backend.policy_version == 2


@pytest.mark.scenario(clauses=["learner-ranks/a-failed-sync-fails-on-every-rank#3"])
def test_the_first_rank_that_failed_is_named(tmp_path):
    _, errors = sync_on_all(tmp_path, broken={2: KeyError("c"), 1: KeyError("b")})
    assert {e.problem for e in errors} == {"rank 1: KeyError: 'b'"}


def test_a_failure_of_an_unknown_kind_leaves_nobody_waiting(tmp_path):
    gone = EngineGone("died")
    events, errors = sync_on_all(tmp_path, broken={0: gone})
    assert errors[0] is gone
    assert [(e.code, e.key, e.problem) for e in errors[1:]] == [
        ("push-failed", "sync", "rank 0 failed; see its traceback")
    ] * 2
    assert "go on" not in {name for _, name in events}


def test_weights_that_cannot_be_made_are_a_failed_push(tmp_path):
    def none():
        raise RuntimeError("out of memory")

    _, errors = sync_on_all(tmp_path, make_weights={2: none})
    assert {e.problem for e in errors} == {"rank 2: RuntimeError: out of memory"}


def test_every_rank_writes_its_sync_down(tmp_path):
    sync_on_all(tmp_path)
    written = [read_journal(tmp_path / f"{rank}.jsonl") for rank in range(3)]
    assert [[(e["event"], e["rank"], e["version"]) for e in events] for events in written] == [
        [("synced", rank, 1)] for rank in range(3)
    ]
