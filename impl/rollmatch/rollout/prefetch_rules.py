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
        """At least 1."""

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
    first_server: int = 0
    """Of this rank's first chunk."""
    max_bytes: int = 256 * 2**20
    """Of rollouts that wait; beyond it only the window that is learnt next is asked for."""
    stuck_after_s: float = 8.0

    def cut(self, step: int, num_requests: int, num_servers: int) -> list[WorkItem]:
        """This rank's work items of a window, as ``cut_work_items``."""
        return cut_work_items(step, num_requests, num_servers, pieces=self.pieces_per_server, first=self.first_server)
