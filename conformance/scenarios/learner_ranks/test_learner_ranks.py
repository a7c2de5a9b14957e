"""Capability ``learner-ranks``, scenario by scenario; what needs a server is pending."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from conformance.doubles.ranks import NoJournal
from conformance.tools.schedule import Action, as_rank, do, explore, meet
from rollmatch.errors import RollmatchError
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import RolloutBackend
from rollmatch.rollout.fence import Fence


class ScheduledRanks(Ranks):
    """A rank whose meetings are actions."""

    def __init__(self, rank, size, act):
        super().__init__(rank=rank, learner_world_size=size)
        object.__setattr__(self, "act", act)

    def barrier(self):
        self.act(meet("barrier"))

    def gather(self, item):
        return self.act(meet("gather", item))


@dataclass
class ScheduledBackend(RolloutBackend):
    """An engine whose push takes two actions."""

    act: Any
    policy_version: int = 0
    pushing: bool = False
    broken: bool = False

    def generate(self, requests, decoding):
        raise NotImplementedError

    def push(self, weights, *, version):
        self.act(do("push begins"))
        self.pushing = True
        for _ in weights:
            pass
        self.act(do("push ends"))
        self.pushing = False
        if self.broken:
            raise OSError("connection reset")
        self.policy_version = version


@dataclass
class FencedWorld:
    """Every rank syncs if due, then generates, for some steps."""

    num_ranks: int
    num_steps: int = 1
    kind: type = Fence
    synced: tuple[int | None, ...] = ()
    """What each rank believes was synced last."""
    broken: tuple[int, ...] = ()
    ranks: list = field(default_factory=list)
    backends: list = field(default_factory=list)
    wrong: str = ""
    failed: dict = field(default_factory=dict)
    generated: int = 0

    def __post_init__(self):
        self.backends = [None] * self.num_ranks
        self.ranks = [as_rank(lambda act, rank=rank: self._run(rank, act)) for rank in range(self.num_ranks)]

    def _run(self, rank, act):
        backend = self.backends[rank] = ScheduledBackend(
            act, policy_version=1 if self.synced else 0, broken=rank in self.broken
        )
        fence = self.kind(backend, ScheduledRanks(rank, self.num_ranks, act), NoJournal())
        fence.synced_step = self.synced[rank] if self.synced else None
        for step in range(self.num_steps):
            try:
                fence.sync_if_due(step, lambda: iter([("a", _Tensor())]))
            except RollmatchError as error:
                self.failed[rank] = error.code
                return
            act(Action("generate"))
            self.generated += 1
            self._judge(rank, step)

    def _judge(self, rank, step):
        versions = [backend.policy_version for backend in self.backends]
        if any(backend.pushing for backend in self.backends):
            self.wrong = f"rank {rank} generates while weights are pushed"
        elif versions[rank] < 1:
            self.wrong = f"rank {rank} generates with weights of nobody"
        elif len(set(versions)) > 1:
            self.wrong = f"rank {rank} generates in step {step} between versions {versions}"

    def state(self):
        return tuple((b.policy_version, b.pushing) if b else None for b in self.backends), self.wrong, len(self.failed)

    def problem(self):
        return self.wrong


class _Tensor:
    def numel(self):
        return 1

    def element_size(self):
        return 4


class LonelyFence(Fence):
    """Each rank decides for itself whether a sync is due."""

    def _agree(self, step):
        return step != self.synced_step, self.backend.policy_version + 1


class FenceWithoutWaitAfter(Fence):
    """Nobody waits for the others after a push."""

    def _push_with_others(self, weights, version):
        self.ranks.act(Action("barrier of one"))
        self.backend.push(weights, version=version)
        return "full"

    def sync_if_due(self, step, weights):
        self.ranks.barrier()
        self._push_with_others(weights(), step + 1)
        return 0.0


class FenceWithoutWaitBefore(Fence):
    """Nobody waits for the others before a push."""

    def sync_if_due(self, step, weights):
        self.backend.push(weights(), version=step + 1)
        self.ranks.barrier()
        return 0.0


def explored(**options):
    """Problems of all orders, and the worlds that were tried."""
    worlds = []

    def make():
        worlds.append(FencedWorld(**options))
        return worlds[-1]

    return {trouble.problem for trouble in explore(make).troubles}, worlds


@pytest.mark.scenario(
    "learner-ranks/every-interleaving-ends",
    clauses=[
        "learner-ranks/a-fence-stands-between-sync-and-generation#2,4",
        "learner-ranks/only-the-main-process-sends-weights#3",
    ],
)
@pytest.mark.parametrize(("num_ranks", "num_steps"), [(1, 2), (2, 2), (3, 1)])
def test_every_interleaving_ends(num_ranks, num_steps):
    problems, worlds = explored(num_ranks=num_ranks, num_steps=num_steps)
    assert problems == set()
    assert max(world.generated for world in worlds) == num_ranks * num_steps


@pytest.mark.scenario(
    "learner-ranks/ranks-that-disagree-after-a-resume",
    clauses=["learner-ranks/a-fence-stands-between-sync-and-generation#3"],
)
@pytest.mark.parametrize("synced", [(0, None), (None, 0), (5, 0, 0), (0, 0, None)])
def test_ranks_that_disagree_after_a_resume(synced):
    problems, worlds = explored(num_ranks=len(synced), synced=synced)
    assert problems == set()
    done = [world for world in worlds if world.generated == len(synced)]
    assert done
    assert all(backend.policy_version == 2 for world in done for backend in world.backends)


@pytest.mark.scenario(clauses=["learner-ranks/a-failed-sync-fails-on-every-rank#1"])
@pytest.mark.parametrize("broken", [(0,), (1,), (0, 1)])
def test_no_rank_generates_after_a_failed_sync(broken):
    problems, worlds = explored(num_ranks=2, broken=broken)
    assert problems == set()
    assert max(world.generated for world in worlds) == 0
    assert max((world.failed for world in worlds), key=len) == dict.fromkeys((0, 1), "push-failed")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kind": LonelyFence, "synced": (0, None)}, "deadlock: rank 1 at barrier"),
        ({"kind": FenceWithoutWaitAfter}, "rank 0 generates while weights are pushed"),
        ({"kind": FenceWithoutWaitAfter}, "rank 0 generates in step 0 between versions [1, 0]"),
        ({"kind": FenceWithoutWaitBefore, "num_steps": 2}, "rank 0 generates while weights are pushed"),
    ],
)
def test_a_broken_fence_is_found(options, problem):
    assert problem in explored(num_ranks=2, **options)[0]
