"""Ranks that sleep, on a clock that jumps: hours of waiting in milliseconds, the same every time.

A rank (see ``schedule``) goes on as soon as what it waits for holds, or its sleep is over; among several that may, the
one with the lowest number goes first. Time passes only when nobody may go on.
"""

from collections.abc import Sequence
from contextlib import suppress

from conformance.harness.schedule import Action, Rank


class VirtualTime:
    """A clock in seconds from 0."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> Action:
        """An action that lasts so long."""
        end = self.now + seconds
        return Action("sleep", item=end, condition=lambda: self.now >= end)

    def run(self, ranks: Sequence[Rank]) -> list[str]:
        """Until nobody can go on; returns the ranks that were left waiting for what never comes."""
        pending: dict[int, Action] = {}
        for rank in range(len(ranks)):
            _resume(ranks, rank, pending)
        while pending:
            ready = [rank for rank, action in pending.items() if action.condition is None or action.condition()]
            if ready:
                _resume(ranks, min(ready), pending)
                continue
            ends = [action.item for action in pending.values() if action.name == "sleep"]
            if not ends:
                break
            self.now = min(ends)
        stuck = [f"rank {rank} at {action.name}" for rank, action in sorted(pending.items())]
        for rank in ranks:
            rank.close()
        return stuck


def _resume(ranks: Sequence[Rank], rank: int, pending: dict[int, Action]) -> None:
    pending.pop(rank, None)
    with suppress(StopIteration):
        pending[rank] = ranks[rank].send(None)
