"""A sync of the native dialect: announced at once, received as one version.

Staged weights (gloo) are received beside generation, and committed later or in the same call; generation pauses for the
commit only. Weights in place (direct) are written over the served ones: nothing is generated from the first byte to the
commit. What may follow what is said by ``server.update``.
"""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rollmatch.errors import RollmatchError, SyncError
from rollmatch.server.announced import check_sync, may_repeat, merge_plan_of, plan_of
from rollmatch.server.communicator import agreed, check_aliases
from rollmatch.server.payloads import SyncAgain, SyncRequest
from rollmatch.server.settings import UNKEPT
from rollmatch.server.state import ServerState
from rollmatch.server.update import Attached, Event, Incoming, Staged, UpdateRefused, dropped
from rollmatch.weights.digest import DIRECT
from rollmatch.weights.transfer_plan import to_wire

_WAIT_S = 0.25
"""How long a worker may wait before it looks for other requests."""


class StagingRefused(SyncError):
    """What was written in place was not committed in the same call."""

    code = "in-place-not-staged"
    status = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a commit did."""

    staged: Staged
    commit_s: float
    num_restarted: int


class NativeSync:
    """Receives, stages, writes, commits and drops; one update at a time."""

    def __init__(self, server: ServerState) -> None:
        self.pool, self.communicator, self.model = server.pool, server.communicator, server.model
        self.update, self.settings = server.update, server.settings
        self._known: tuple[Attached | None, SyncRequest] | None = None
        """A request that may be named again, and the group in which the workers got it."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def stage(self, request: SyncRequest) -> Staged:
        """Receive and verify on all workers; a failure leaves no trace.

        Errors: ``UpdateRefused``, ``keep-unavailable``, those of ``announced`` and of the workers.
        """
        attached = self._begin(request, Event.ANNOUNCED)
        try:
            staged = await self._receive(request, in_place=False)
            self.update.receive(staged)
        except asyncio.CancelledError:  # the learner hung up: its group is of no more use
            self._run_on(self.communicator.close(only=attached))
            raise
        except RollmatchError:
            if self.update.attached is attached:
                await self.pool.call_all("rollmatch_drop")
            raise
        finally:
            if self.update.expects(Event.FAILED):
                self.update.fire(Event.FAILED)
        return staged

    async def write(self, request: SyncRequest) -> Committed:
        """Receive in place, verify, serve; completes even if the caller hangs up, whose group is closed then.

        Errors: ``StagingRefused``, as ``stage``; afterwards the old weights serve if none was touched, else none do.
        """
        self.update.check_attached(request.client)
        if not request.commit:
            problem = "adapters, and weights of GPUs that hold parts of a model, are written in place"
            remedy = "Announce with commit: true (sync.stage: false), or use transport gloo."
            raise StagingRefused(problem, key="commit", remedy=remedy)
        attached = self._begin(request, Event.ANNOUNCED_IN_PLACE)
        task = self._run_on(self._write(request))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._run_on(self._leave(attached, task))
            raise

    def request_like(self, again: SyncAgain) -> SyncRequest:
        """The whole request that ``again`` stands for. Errors: ``UpdateRefused``."""
        attached, known = self._known or (None, None)
        if known is None or known.sync_id != again.like or attached is not self.update.attached:
            problem, remedy = "nothing of this name was announced", "Announce the tensors themselves."
            raise UpdateRefused(problem, key="like", remedy=remedy, code="announcement-unknown")
        if again.commit != known.commit and attached is not None and attached.transport == DIRECT:
            problem, remedy = "was to be received elsewhere: staged, or in place", "Announce the tensors themselves."
            raise UpdateRefused(problem, key="like", remedy=remedy, code="announcement-unknown")
        fields = {"sync_id": again.sync_id, "version": again.version, "client": again.client, "commit": again.commit}
        fields["keep"] = again.keep
        return known.model_copy(update=fields)

    async def commit(self, sync_id: str | None) -> Committed:
        """Make what is staged the served version; completes even if the caller hangs up. Errors: ``UpdateRefused``."""
        staged = self.update.staged
        if staged is None or sync_id not in (None, staged.sync_id):
            problem = "nothing is staged" if staged is None else f"staged is {staged.sync_id}"
            raise UpdateRefused(problem, key="sync_id", remedy="Sync again.", code="nothing-staged")
        began = time.perf_counter()
        num_restarted = await asyncio.shield(self._run_on(self.communicator.swap(staged.version, keep=staged.keep)))
        return Committed(staged=staged, commit_s=time.perf_counter() - began, num_restarted=num_restarted)

    async def drop(self) -> bool:
        """Throw away what is staged or on its way; whether there was anything. What is being loaded is kept."""
        if not self.update.expects(Event.DROPPED):
            return False
        was_there = self.update.incoming is not Incoming.NONE
        self.update.fire(Event.DROPPED)
        await self.pool.call_all("rollmatch_drop")
        return was_there

    def _begin(self, request: SyncRequest, event: Event) -> Attached:
        """Check a request before anything is received. Errors: as ``stage``, but for the workers'."""
        attached = self.update.check_attached(request.client)
        if request.keep and not self.settings.may_keep:
            problem = "with its engine_arguments this server does not know which version wrote which token"
            remedy = f"Remove {' and '.join(UNKEPT)} from them, or send keep: false."
            raise SyncError(problem, code="keep-unavailable", key="keep", remedy=remedy)
        self.update.check(event)
        self.update.check_newer(request.version)
        if not self._known_as(request):
            check_sync(request, self.model)
        self.update.fire(event)
        return attached

    async def _write(self, request: SyncRequest) -> Committed:
        update = self.update
        async with self.pool.resuming(keep=request.keep):
            try:
                num_restarted = await self.pool.drain(within_s=self.communicator.drain_s, keep=request.keep)
                update.fire(Event.WRITE)
                staged = await self._receive(request, in_place=True)
            except BaseException:
                outcome = Event.KEPT if update.incoming is Incoming.DRAINING else Event.SPOILT
                try:
                    if update.incoming is Incoming.WRITING and await self._is_whole():
                        outcome = Event.KEPT
                finally:
                    update.fire(outcome)  # also if the workers cannot be asked
                raise
            update.serve(request.version)
        return Committed(staged=staged, commit_s=0.0, num_restarted=num_restarted)

    async def _is_whole(self) -> bool:
        """Whether every worker holds weights of one version; forgets what failed."""
        replies = await self.pool.call_all("rollmatch_whole")
        if self.update.attached is not None:
            await self.pool.call_all("rollmatch_drop")
        return all(reply["whole"] for reply in replies)

    async def _leave(self, attached: Attached, task: asyncio.Task[Committed]) -> None:
        """The caller is gone: close its group, then forget how its update ended."""
        await self.communicator.close(only=attached)
        with suppress(RollmatchError):
            await task

    def _known_as(self, request: SyncRequest) -> SyncRequest | None:
        """The request of the same tensors that the workers got in this group."""
        attached, known = self._known or (None, None)
        is_like = known is not None and request.tensors is known.tensors and attached is self.update.attached
        return known if is_like else None

    async def _receive(self, request: SyncRequest, *, in_place: bool) -> Staged:
        """What is announced, on all workers, verified and merged.

        ``in_place``: nothing is generated meanwhile; caches are emptied while the bytes travel, workers may wait, and
        they merge as soon as an adapter has arrived.
        """
        began, attached = time.perf_counter(), self.update.attached
        if known := self._known_as(request):
            await self.pool.call_all("rollmatch_receive_again", request.sync_id, known.sync_id)
        else:
            await self.pool.call_all("rollmatch_receive", to_wire(plan_of(request, self.model, in_place=in_place)))
        if in_place:
            await self.communicator.forget_old(keep=request.keep)
        digests = agreed(await self.communicator.settle(wait_s=_WAIT_S if in_place else 0.0))
        if any(spec.name not in digests for spec in request.tensors):
            raise dropped(request.sync_id)
        check_aliases(digests, self.model)
        if not known and may_repeat(request):
            self._known = attached, request
        return Staged(
            sync_id=request.sync_id,
            version=request.version,
            digests=tuple(digests[spec.name] for spec in request.tensors),
            merged_digests=_merged_in(digests, request) if in_place else await self._merge(request),
            receive_s=time.perf_counter() - began,
            keep=request.keep,
        )

    async def _merge(self, request: SyncRequest) -> dict[str, str]:
        """What was staged; returns digests by weight."""
        if request.adapter is None:
            return {}
        plan = merge_plan_of(request.adapter, self.model)
        replies = await self.pool.call_all("rollmatch_merge", to_wire(plan))
        return agreed([reply["digests"] for reply in replies])

    def _run_on(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run to the end, whoever waits for it; kept so that it is not collected."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _merged_in(digests: Mapping[str, str], request: SyncRequest) -> dict[str, str]:
    """Those of weights that were merged in place."""
    return {merge.name: digests[merge.name] for merge in (request.adapter.merges if request.adapter else ())}
