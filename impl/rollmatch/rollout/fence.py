"""When weights move: before the first rollout of every optimizer step, and never while one is written.

State machine of one rank, with g the optimizer step the learner is at::

    synced at step s, version v  --(rollouts wanted, s == g on all ranks)-->  rollouts may be asked for
    synced at step s, version v  --(rollouts wanted, s != g on some rank)-->  barrier, push, verdict, barrier
                                                                              -> synced at step g, version v + 1

Ranks agree first whether a sync is due, because after a resume they may remember different steps. An engine that lost
its weights (a server that was started again) makes one due, too. The verdict is shared before anybody goes on: a push
that failed on one rank is the same error on all of them. A rank that is alone has nobody to tell and raises what its
backend raised.
"""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, runtime_checkable

from rollmatch.errors import FAILURES, RollmatchError, SyncError
from rollmatch.journal import Journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import RolloutBackend

LOG = logging.getLogger("rollmatch.sync")
Mode = Literal["full", "adapter"]


class AdapterSyncFailed(SyncError):
    """Without a fallback, every adapter sync must succeed."""

    code = "adapter-sync-failed"


@runtime_checkable
class AdapterTaker(Protocol):
    """A backend that merges adapters on its own side; one that does not gets all weights in every mode."""

    def push_adapter(self, adapter: Any, *, version: int) -> None:
        """As ``push``, for an adapter."""


class SyncMode:
    """Starts as configured and may fall back to full, once and for all.

    Success is what the servers have proven by digests, not a status: a push that returns has been proven.
    """

    def __init__(self, mode: Mode = "full", *, fallback_to_full: bool = True) -> None:
        self.mode: Mode = mode
        self.fallback_to_full = fallback_to_full

    def push(self, backend: RolloutBackend, weights: Any, *, version: int) -> Mode:
        """Returns what was carried. Errors: those of the backend, ``AdapterSyncFailed``."""
        if self.mode == "adapter" and isinstance(backend, AdapterTaker):
            try:
                backend.push_adapter(weights.adapter(), version=version)
            except RollmatchError as error:
                self._fall_back(error)
                version = backend.policy_version + 1  # some server may have taken the version that failed
            else:
                return "adapter"
        backend.push(weights, version=version)
        return "full"

    def _fall_back(self, error: RollmatchError) -> None:
        if not self.fallback_to_full:
            raise AdapterSyncFailed(
                f"{type(error).__name__}: {error}",
                key="custom.extra.rollout_matching.vllm.sync.mode",
                remedy="Set sync.mode: full.",
            ) from error
        self.mode = "full"
        LOG.warning("adapter sync failed; from now on every sync carries all weights: %s", error)


class PushFailed(SyncError):
    """A rank failed to load the new weights."""

    code = "push-failed"


@runtime_checkable
class Forgetful(Protocol):
    """A backend whose engines may lose their weights behind the learner's back."""

    def is_current(self) -> bool:
        """Whether they still are those that took the last push."""


class Fence:
    """Keeps a backend's weights equal to the learner's whenever a rollout is asked for."""

    def __init__(
        self, backend: RolloutBackend, ranks: Ranks, journal: Journal, *, mode: SyncMode | None = None
    ) -> None:
        self.backend = backend
        self.ranks = ranks
        self.journal = journal
        self.mode = mode or SyncMode()
        self.synced_step: int | None = None
        self._last: tuple[int, Callable[[], Iterable[tuple[str, Any]]]] | None = None
        self.step_of: dict[int, int] = {}
        """Policy version -> the optimizer step whose weights it is, for all versions that this fence has sent."""
        self.quiet: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around every push: where calls are under way while the learner learns, it waits for their end."""

    def sync_if_due(self, step: int, weights: Callable[[], Iterable[tuple[str, Any]]]) -> float:
        """Push if the learner has moved since the last sync; returns the seconds it took, less the wait for quiet.

        Errors: ``PushFailed``.
        """
        self._last = step, weights
        is_due, version = self._agree(step)
        if not is_due:
            return 0.0
        self.synced_step = None
        with self.quiet():
            began = time.perf_counter()
            self._push_between_barriers(step, weights, version=version)
            self.synced_step = self.step_of[self.backend.policy_version] = step
            return time.perf_counter() - began

    def sync_again(self) -> float:
        """Push the weights of the last sync again, to a server that has lost them. Errors: as ``sync_if_due``."""
        assert self._last is not None, "there was a sync before"
        return self.sync_if_due(*self._last)

    def _push_between_barriers(
        self, step: int, weights: Callable[[], Iterable[tuple[str, Any]]], *, version: int
    ) -> None:
        began = time.perf_counter()
        self.ranks.barrier()
        counted = Counted(weights)
        carried: str
        if self.ranks.learner_world_size == 1:
            carried = self.mode.push(self.backend, counted, version=version)
        else:
            carried = self._push_with_others(counted, version)
        self.journal.write(  # before the barrier: whoever leaves it knows that every rank's sync has ended
            "synced",
            step=step,
            version=self.backend.policy_version,
            mode=carried,
            num_tensors=counted.num_tensors,
            num_bytes=counted.num_bytes,
            seconds=round(time.perf_counter() - began, 4),
        )
        self.ranks.barrier()

    def _agree(self, step: int) -> tuple[bool, int]:
        """Whether any rank finds a sync due, and the version it would make: one above the newest known to any."""
        is_due = step != self.synced_step or not _is_current(self.backend)
        states = self.ranks.gather((is_due, self.backend.policy_version))
        return any(due for due, _ in states), max(version for _, version in states) + 1

    def _push_with_others(self, weights: "Counted", version: int) -> str:
        """Push and share the verdict; also where a push fails in a way not listed, so that nobody waits for ever."""
        carried, cause = "", None
        problem = f"rank {self.ranks.rank} failed; see its traceback"
        try:
            carried = self.mode.push(self.backend, weights, version=version)
            problem = ""
        except FAILURES as error:
            problem, cause = f"rank {self.ranks.rank}: {type(error).__name__}: {error}", error
        finally:
            problems = [text for text in self.ranks.gather(problem) if text]
        if problems:
            remedy = "See the traceback of the first rank that failed."
            raise PushFailed(problems[0], key="sync", remedy=remedy) from cause
        return carried


def _is_current(backend: RolloutBackend) -> bool:
    return not isinstance(backend, Forgetful) or backend.is_current()


class Counted:
    """Passes weights through and counts them; they are made when the backend first asks, as a part of the push."""

    def __init__(self, weights: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        self._weights = weights
        self.num_tensors = 0
        self.num_bytes = 0

    @property
    def is_sharded(self) -> bool:
        """As of the weights; they are taken for sharded where they do not tell, because that is safe."""
        return bool(getattr(self._weights(), "is_sharded", True))

    def adapter(self) -> Any:
        """The adapter alone, counted."""
        adapter = self._weights().adapter()  # type: ignore[attr-defined]
        self.num_tensors = self.num_bytes = 0
        for _, tensor in adapter.tensors:
            self._count(tensor)
        return adapter

    def __iter__(self) -> Any:
        self.num_tensors = self.num_bytes = 0
        for name, tensor in self._weights():
            self._count(tensor)
            yield name, tensor

    def _count(self, tensor: Any) -> None:
        self.num_tensors += 1
        self.num_bytes += tensor.numel() * tensor.element_size()
