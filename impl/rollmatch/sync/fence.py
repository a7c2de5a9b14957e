"""When weights move: before the first rollout of every optimizer step, and never while one is written.

State machine of one rank, with g the optimizer step the learner is at::

    synced at step s, version v  --(rollouts wanted, s == g)-->  rollouts may be asked for
    synced at step s, version v  --(rollouts wanted, s != g)-->  barrier, push, verdict, barrier
                                                                 -> synced at step g, version v + 1

The verdict is shared before anybody goes on: a push that failed on one rank is the same error on all of them. A rank
that is alone has nobody to tell and raises what its backend raised.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from rollmatch.errors import RollmatchError, SyncError
from rollmatch.journal import Journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import RolloutBackend

FAILURES = (RollmatchError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, OSError, AssertionError)
"""What a push is known to fail with: bugs, engines and connections."""


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
        counted = _Counted(weights)
        if self.ranks.learner_world_size == 1:
            self.backend.push(counted, version=self.backend.policy_version + 1)
        else:
            self._push_with_others(counted)
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

    def _push_with_others(self, weights: "_Counted") -> None:
        """Push and share the verdict; also where a push fails in a way not listed, so that nobody waits for ever."""
        problem, cause = f"rank {self.ranks.rank} failed, and tells why itself", None
        try:
            self.backend.push(weights, version=self.backend.policy_version + 1)
            problem = ""
        except FAILURES as error:
            problem, cause = f"rank {self.ranks.rank}: {type(error).__name__}: {error}", error
        finally:
            problems = [text for text in self.ranks.gather(problem) if text]
        if problems:
            remedy = "See the first rank that failed; the run cannot go on."
            raise PushFailed(problems[0], key="sync", remedy=remedy) from cause


class _Counted:
    """Passes weights through and counts them; they are made when the backend first asks, as a part of the push."""

    def __init__(self, weights: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        self._weights = weights
        self.num_tensors = 0
        self.num_bytes = 0

    def __iter__(self) -> Any:
        for name, tensor in self._weights():
            self.num_tensors += 1
            self.num_bytes += tensor.numel() * tensor.element_size()
            yield name, tensor
