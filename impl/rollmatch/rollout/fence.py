"""When weights move: before the first rollout of every optimizer step, and never while one is written.

State machine of one rank, with g the optimizer step the learner is at::

    synced at step s, version v  --(rollouts wanted, s == g on all ranks)-->  rollouts may be requested
    synced at step s, version v  --(rollouts wanted, s != g on some rank)-->  barrier, push, verdict, barrier
                                                                              -> synced at step g, version v + 1

Ranks agree first whether a sync is due, because after a resume they may remember different steps. An engine that lost
its weights (a server that was started again) makes one due, too. The verdict is shared before any rank continues: a
push that failed on one rank is the same error on all of them. A single rank raises what its backend raised. A push that
broke because servers were gone for a while is repeated as a newer version.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rollmatch.errors import FAILURES, RollmatchError, SyncError, kind_and_text
from rollmatch.journal import Journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import RolloutBackend
from rollmatch.weights.named_weights import Adapter, ListedWeights, NamedWeights
from rollmatch.weights.plan import Spec

LOG = logging.getLogger("rollmatch.sync")
MAX_PUSHES = 3
"""Of one sync."""
Mode = Literal["full", "adapter"]


class Counted:
    """Weights on their way to a backend, counted for the journal; made when the backend first iterates."""

    def __init__(self, weights: Callable[[], NamedWeights]) -> None:
        self._weights = weights
        self._types: Mapping[str, torch.dtype] | None = None
        self.num_tensors = self.num_bytes = 0

    @property
    def is_sharded(self) -> bool:
        """As of the weights; sharded by default, because that is safe."""
        return bool(getattr(self._weights(), "is_sharded", True))

    def specs(self) -> Sequence[Spec] | None:
        """As of the weights."""
        weights: object = self._weights()
        return weights.specs() if isinstance(weights, ListedWeights) else None

    def gather_in(self, types: Mapping[str, torch.dtype]) -> None:
        """As of the weights."""
        self._types = types

    def adapter(self) -> Adapter:
        """The adapter alone, counted; base weights count where they are taken, too."""
        adapter = self._weights().adapter()
        self.num_tensors = self.num_bytes = 0
        for _, tensor in adapter.tensors:
            self._count(tensor)
        return replace(adapter, base=self._counted(adapter.base))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.num_tensors = self.num_bytes = 0
        weights = self._weights()
        if self._types is not None:
            weights.gather_in(self._types)
        yield from self._counted(weights)

    def _counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._count(tensor)
            yield name, tensor
            del tensor  # not kept while the next one is gathered

    def _count(self, tensor: Tensor) -> None:
        self.num_tensors += 1
        self.num_bytes += tensor.numel() * tensor.element_size()


class SyncMode:
    """Starts as configured and may fall back to full, once and for all.

    Success is what the servers have proven by digests, not a status: a push that returns has been proven.
    """

    def __init__(self, mode: Mode = "full", *, fallback_to_full: bool = True) -> None:
        self.mode: Mode = mode
        self.fallback_to_full = fallback_to_full

    def push(self, backend: RolloutBackend, weights: Counted, ranks: Ranks, *, version: int) -> Mode:
        """Returns the mode of what was sent, the same on all ranks. Errors: those of the backend and of ``attempt``."""
        if self.mode == "adapter" and backend.takes_adapters:
            if self.attempt(lambda: backend.push_adapter(weights.adapter(), version=version), ranks):
                return "adapter"
            version = backend.policy_version + 1  # some server may have taken the version that failed
        backend.push(weights, version=version)
        return "full"

    def attempt(self, send: Callable[[], object], ranks: Ranks) -> bool:
        """Whether what sends an adapter succeeds on all ranks; if not, all of them send all weights from then on.

        Errors: ``adapter-sync-failed``; those of ``send`` that are no ``RollmatchError``.
        """
        cause: Exception | None = None
        try:
            send()
        except FAILURES as error:
            cause = error
        problem = next(filter(None, ranks.gather("" if cause is None else f"{type(cause).__name__}: {cause}")), None)
        if problem is None:
            return True
        if cause is not None and not isinstance(cause, RollmatchError):
            raise cause
        if not self.fallback_to_full:
            raise SyncError(
                problem,
                code="adapter-sync-failed",
                key="custom.extra.rollout_matching.vllm.sync.mode",
                remedy="Set sync.mode: full.",
            ) from cause
        self.mode = "full"
        if ranks.is_primary:
            LOG.warning("adapter sync failed; from now on every sync sends all weights: %s", problem)
        return False


class PushFailed(SyncError):
    """A rank failed to load the new weights."""

    code = "push-failed"
    is_shared = True


class _State(NamedTuple):
    """What a rank contributes before a sync."""

    is_due: bool
    version: int
    lost: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()


class _Verdict(NamedTuple):
    """What became of a rank's push; no problem: it succeeded."""

    problem: str
    again: bool
    """Whether nothing stands against another push, also where this one succeeded."""
    lost: frozenset[int]
    instances: dict[int, str] | None
    """The servers' processes that took the push; rank 0's count."""


class Fence:
    """Keeps a backend's weights equal to the learner's whenever a rollout is requested."""

    def __init__(
        self, backend: RolloutBackend, ranks: Ranks, journal: Journal, *, mode: SyncMode | None = None
    ) -> None:
        self.backend = backend
        self.ranks = ranks
        self.journal = journal
        self.mode = mode or SyncMode()
        self.synced_step: int | None = None
        self._last: tuple[int, Callable[[], NamedWeights]] | None = None
        self.step_of: dict[int, int] = {}
        """Policy version -> the optimizer step whose weights it is, for all versions that this fence has sent."""
        self.quiet: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around every push: where calls are under way while the learner learns, it waits for their end."""

    def sync_if_due(self, step: int, weights: Callable[[], NamedWeights]) -> float:
        """Push if the learner has moved since the last sync; returns the seconds it took, less the wait for quiet.

        Errors: ``PushFailed``.
        """
        self._last, has_moved = (step, weights), step != self.synced_step
        with ExitStack() as quiet:
            if has_moved:
                quiet.enter_context(self.quiet())  # servers join and leave while no calls are under way
            is_due, version = self._agree(step)
            if not is_due:
                return 0.0
            if not has_moved:
                quiet.enter_context(self.quiet())
            self.synced_step, first = None, version
            began = time.perf_counter()
            self._push_between_barriers(step, weights, version=version)
            self.synced_step = step
            # Versions of pushes that were repeated, too: some server may have taken one, and written with it.
            self.step_of |= dict.fromkeys(range(first, self.backend.policy_version + 1), step)
            return time.perf_counter() - began

    def sync_again(self) -> float:
        """Push the weights of the last sync again, to a server that has lost them. Errors: as ``sync_if_due``."""
        assert self._last is not None, "there was a sync before"
        return self.sync_if_due(*self._last)

    def _push_between_barriers(self, step: int, weights: Callable[[], NamedWeights], *, version: int) -> None:
        began = time.perf_counter()
        self.ranks.barrier()
        counted = Counted(weights)
        carried = self._push_until_taken(counted, step, version)
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
        """Whether any rank finds a sync due, and the version it would make: one above the newest known to any.

        Servers that any rank has lost take no part on all of them; rank 0 readmits those that are well again, and
        where the learner has moved it reads the list of servers again.
        """
        has_moved, joined = step != self.synced_step, list[int]()
        members = self.backend.members
        if members is not None and members.roster is not None:
            joined = members.roster.update(is_read=has_moved)
        is_due = has_moved or not self.backend.is_current()
        mine = _State(is_due, max([self.backend.policy_version, *joined]))
        if members is not None and members.lost:
            returned = members.find_returned() if self.ranks.is_primary else mine.returned
            mine = mine._replace(lost=members.lost, returned=returned)
        states = [_State(*state) for state in self.ranks.gather(mine)]
        returned, is_due = states[0].returned, any(state.is_due for state in states)
        if members is not None:
            lost = frozenset[int]().union(*(state.lost for state in states))
            members.agree_on(lost - returned)
            if lost and is_due and not has_moved:  # for a server, perhaps, that only another rank knew to be lost
                is_due = any(self.ranks.gather(not self.backend.is_current()))
        return is_due or bool(returned), max(state.version for state in states) + 1

    def _push_until_taken(self, weights: Counted, step: int, version: int) -> Mode:
        """Push, again as a newer version where servers were gone for a while. Errors: as ``_push``."""
        for pushes_left in reversed(range(MAX_PUSHES)):
            if carried := self._push(weights, version, may_repeat=pushes_left > 0):
                return carried
            version = max(version, self.backend.policy_version) + 1
            self.journal.write("sync_repeated", step=step, version=version)
        raise AssertionError("the last push returns or raises")

    def _push(self, weights: Counted, version: int, *, may_repeat: bool) -> Mode | None:
        """Push; None on all ranks where it failed and may be repeated. Errors: ``PushFailed``; alone, the backend's."""
        if self.ranks.learner_world_size > 1:
            return self._push_with_others(weights, version, may_repeat=may_repeat)
        try:
            return self.mode.push(self.backend, weights, self.ranks, version=version)
        except RollmatchError as error:
            if not (may_repeat and self.backend.may_push_again(error)):
                raise
            return None

    def _push_with_others(self, weights: Counted, version: int, *, may_repeat: bool) -> Mode | None:
        """Push and share the verdict; also where a push fails in a way not listed, so that nobody waits for ever."""
        carried, cause, again = None, None, False
        problem = f"rank {self.ranks.rank} failed; see its traceback"
        try:
            carried = self.mode.push(self.backend, weights, self.ranks, version=version)
            problem, again = "", True
        except FAILURES as error:
            problem, cause = f"rank {self.ranks.rank}: {kind_and_text(error)}", error
            again = may_repeat and isinstance(error, RollmatchError) and self.backend.may_push_again(error)
        finally:
            verdicts = self._share(problem, again=again)
        problems = [verdict.problem for verdict in verdicts if verdict.problem]
        if problems and all(verdict.again for verdict in verdicts):
            return None
        if problems:
            remedy = "See the traceback of the first rank that failed."
            raise PushFailed(problems[0], key="sync", remedy=remedy) from cause
        return carried

    def _share(self, problem: str, *, again: bool) -> list[_Verdict]:
        """The verdicts of all ranks; a server that one has lost while it waited is lost on all."""
        members = self.backend.members
        if members is None:
            mine = _Verdict(problem, again, frozenset(), None)
        else:
            mine = _Verdict(problem, again, members.lost, members.instances)
        verdicts = [_Verdict(*verdict) for verdict in self.ranks.gather(mine)]
        if members is not None:
            members.agree_on(frozenset().union(*(verdict.lost for verdict in verdicts)))
            members.instances = verdicts[0].instances
        return verdicts
