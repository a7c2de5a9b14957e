"""The rollouts of one optimizer step while they arrive, and the calls that brought them. Needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollmatch.records import Rollout, RolloutRequest, rounded
from rollmatch.rollout.work_items import WorkItem


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedCall:
    """One call that was answered; times are unix seconds."""

    item: WorkItem
    began: float
    ended: float
    policy_version: int
    num_tokens: int

    def as_list(self) -> list[float]:
        """For the journal: server, begin, end, optimizer step, first request and the one after the last."""
        item = self.item
        return [item.server_index, rounded(self.began), rounded(self.ended), item.step, item.start, item.stop]


BYTES_PER_ID = 8
"""What a token id is counted as."""


@dataclass(slots=True)
class PendingWindow:
    """Requests of a step in the learner's order, and the answers that have come."""

    step: int
    requests: tuple[RolloutRequest, ...]
    rollouts: list[Rollout | None] = field(init=False)
    num_again: int = 0
    """Rollouts that became too old and were requested again."""

    def __post_init__(self) -> None:
        self.rollouts = [None] * len(self.requests)

    @property
    def is_complete(self) -> bool:
        """Whether every request has been answered."""
        return None not in self.rollouts

    def complete_groups(self, size: int) -> set[int]:
        """Places of the groups of ``size`` rollouts that have all come, and were not taken."""
        starts = range(0, len(self.rollouts), size)
        return {start // size for start in starts if None not in self.rollouts[start : start + size]}

    @property
    def num_bytes(self) -> int:
        """Of the answers that wait here."""
        return sum(
            BYTES_PER_ID * (len(rollout.prompt_token_ids) + len(rollout.response_token_ids))
            for rollout in self.rollouts
            if rollout is not None
        )

    def put(self, item: WorkItem, rollouts: Sequence[Rollout]) -> None:
        """Store the rollouts of one item."""
        self.rollouts[item.start : item.stop] = list(rollouts)

    def drop_older(self, min_version: int) -> list[int]:
        """Forget rollouts of versions below ``min_version``; returns their indices, ascending."""
        old = [i for i, each in enumerate(self.rollouts) if each is not None and each.policy_version < min_version]
        for index in old:
            self.rollouts[index] = None
        return old

    def taken(self) -> list[Rollout]:
        """All answers, once they are there."""
        assert self.is_complete, "a window is taken whole"
        return [rollout for rollout in self.rollouts if rollout is not None]
