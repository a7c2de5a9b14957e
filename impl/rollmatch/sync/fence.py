"""When weights move: before the first rollout of every optimizer step, and never while one is written.

State machine of one rank, with g the optimizer step the learner is at::

    synced at step s, version v  --(rollouts wanted, s == g)-->  rollouts may be asked for
    synced at step s, version v  --(rollouts wanted, s != g)-->  barrier, push, verdict, barrier
                                                                 -> synced at step g, version v + 1

The verdict is shared before anybody goes on: a push that failed on one rank is the same error on all of them.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from rollmatch.errors import RollmatchError, SyncError
from rollmatch.journal import Journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import RolloutBackend


class PushFailed(SyncError):
    """Every rank's engine took the new weights."""

    code = "push-failed"


class Fence:
    """Keeps a backend's weights equal to the learner's whenever a rollout is asked for."""

    def __init__(self, backend: RolloutBackend, ranks: Ranks, journal: Journal) -> None:
        self.backend = backend
        self.ranks = ranks
        self.journal = journal
        self.synced_step: int | None = None

    def sync_if_due(self, step: int, weights: Callable[[], Iterable[tuple[str, Any]]]) -> float:
        """Push if the learner has moved since the last sync; returns the seconds it took. Errors: ``PushFailed``."""
        if step == self.synced_step:
            return 0.0
        began = time.perf_counter()
        self.ranks.barrier()
        counted = _Counted(weights())
        problem = self._push(counted)
        problems = [text for text in self.ranks.gather(problem) if text]
        if problems:
            raise PushFailed(problems[0], key="sync", remedy="See the first rank that failed; the run cannot go on.")
        self.ranks.barrier()
        self.synced_step = step
        seconds = time.perf_counter() - began
        self.journal.write(
            "synced",
            step=step,
            version=self.backend.policy_version,
            mode="full",
            num_tensors=counted.num_tensors,
            num_bytes=counted.num_bytes,
            seconds=round(seconds, 4),
        )
        return seconds

    def _push(self, weights: "_Counted") -> str:
        """Empty if it worked, else what went wrong, for the other ranks."""
        try:
            self.backend.push(weights, version=self.backend.policy_version + 1)
        except (RollmatchError, RuntimeError, ValueError, KeyError, AttributeError) as error:
            if self.ranks.learner_world_size == 1:
                raise
            return f"rank {self.ranks.rank}: {type(error).__name__}: {error}"
        return ""


class _Counted:
    """Passes weights through and counts what went by."""

    def __init__(self, weights: Iterable[tuple[str, Any]]) -> None:
        self._weights = weights
        self.num_tensors = 0
        self.num_bytes = 0

    def __iter__(self) -> Any:
        for name, tensor in self._weights:
            self.num_tensors += 1
            self.num_bytes += tensor.numel() * tensor.element_size()
            yield name, tensor
