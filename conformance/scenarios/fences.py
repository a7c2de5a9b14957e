"""Learner ranks with an engine each, behind the real fence, as a world for the scheduler."""

from dataclasses import dataclass, field
from typing import Any

from conformance.harness.schedule import Action, as_rank, do, meet
from rollmatch.errors import RollmatchError
from rollmatch.ranks import Ranks
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
class ScheduledBackend:
    """An engine whose push takes two actions."""

    act: Any
    policy_version: int = 0
    pushing: bool = False
    broken: bool = False

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


class NoJournal:
    """A journal that nobody reads."""

    def write(self, event, **fields):
        return fields


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
