"""Bounds and errors of rollouts that are made while the learner learns. Needs no torch."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollmatch.records import Rollout, RolloutRequest
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.work_items import WorkItem, cut_work_items


class ServerBackend(Protocol):
    """Servers that can be called one by one, from several threads."""

    @property
    def num_servers(self) -> int:
        """At least 1; those that join come behind the others, before weights are sent."""

    @property
    def lost(self) -> Collection[int]:
        """Servers that take no calls; their work goes to the others."""

    def generate_on(
        self, server_index: int, requests: Sequence[RolloutRequest], decoding: Decoding, *, start: int
    ) -> list[Rollout]:
        """One rollout per request, in order, by one server in one call; ``start`` is for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchRules:
    """Bounds. ``max_windows`` counts the one that is learnt next; with ``pieces_per_server`` late work moves."""

    max_windows: int
    callers_per_server: int
    pieces_per_server: int = 1
    group_size: int | None = None
    """Rollouts of a sample, where each sample is a call of its own; None: calls follow from ``pieces_per_server``."""
    first_server: int = 0
    """Of this rank's first chunk."""
    max_bytes: int = 256 * 2**20
    """Of rollouts that wait; beyond it only the window that is learnt next is asked for."""
    stuck_after_s: float = 8.0

    def cut(self, step: int, num_requests: int, servers: Sequence[int]) -> list[WorkItem]:
        """This rank's work items of a window, as ``cut_work_items``, for these servers; or one per group.

        >>> rules = PrefetchRules(max_windows=1, callers_per_server=2, group_size=2)
        >>> [(item.server_index, item.start, item.stop) for item in rules.cut(0, 6, [1, 3])]
        [(1, 0, 2), (1, 2, 4), (3, 4, 6)]
        """
        size = self.group_size or 1
        pieces = num_requests if self.group_size else self.pieces_per_server
        items = cut_work_items(step, num_requests // size, len(servers), pieces=pieces, first=self.first_server)
        return [WorkItem(step, servers[one.server_index], one.start * size, one.stop * size) for one in items]

    @property
    def moves(self) -> bool:
        """Whether an idle server takes calls that wait for another one."""
        return self.pieces_per_server > 1 or self.group_size is not None
