"""Updates of the native dialect: announced at once, then staged beside generation or written in place, as one version.

Staged weights (gloo) are committed later or in the same call; generation pauses for the commit only. Weights in place
(direct) overwrite the served ones, so nothing is generated from the first byte to the commit.
"""

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rollmatch.errors import RollmatchError, SyncError
from rollmatch.server.announced import AnnouncementInvalid, check_sync, may_repeat, merge_plan_of, plan_of
from rollmatch.server.communicator import Attached, Communicator
from rollmatch.server.engine_pool import BROKEN, SERVING, UPDATING, WRITING, EnginePool
from rollmatch.server.failures import WorkerDead
from rollmatch.server.identity import Model
from rollmatch.server.payloads import SyncAgain, SyncRequest
from rollmatch.weights.digest import DIRECT, DigestMismatch
from rollmatch.weights.transfer_plan import to_wire

_WAIT_S = 0.25
"""How long a worker may wait before it looks for other requests."""


class StagingRefused(SyncError):
    """What is written in place is committed in the same call."""

    code = "in-place-not-staged"
    status = 400


class UpdateRefused(SyncError):
    """One update at a time, each with a newer version; what is committed was staged.

    ``code``: ``update-in-progress``, ``version-not-newer``, ``nothing-staged``, ``announcement-unknown``,
    ``sync-dropped`` or ``weights-broken``.
    """

    code = "update-refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Weights that every worker holds beside the served ones."""

    sync_id: str
    version: int
    digests: tuple[str, ...]
    merged_digests: dict[str, str]
    receive_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a commit did."""

    staged: Staged
    commit_s: float
    num_restarted: int


class Update:
    """Stages, commits and drops; one update at a time over all dialects."""

    def __init__(self, pool: EnginePool, communicator: Communicator, model: Model, *, drain_s: float) -> None:
        self.pool = pool
        self.communicator = communicator
        self.model = model
        self.drain_s = drain_s
        self.staged: Staged | None = None
        self.is_busy = False
        self._known: tuple[Attached | None, SyncRequest] | None = None
        """A request that may be named again, and the group in which the workers got it."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def stage(self, request: SyncRequest) -> Staged:
        """Receive and verify on all workers; a failure leaves no trace.

        Errors: ``UpdateRefused``, those of ``announced`` and of the workers.
        """
        attached = self._begin(request)
        try:
            self.staged = await self._receive(request)
        except asyncio.CancelledError:  # the learner hung up: its group is of no more use
            self._run_on(self.communicator.close(only=attached))
            raise
        except RollmatchError:
            if self.communicator.attached is attached:
                await self.drop()
            raise
        finally:
            self.is_busy = False
        return self.staged

    async def write_in_place(self, request: SyncRequest) -> Committed:
        """Receive, verify, serve; completes even if the caller hangs up, whose group is closed then.

        Errors: ``StagingRefused``, as ``stage``; afterwards the old weights serve if none was touched, else none do.
        """
        self.communicator.check_attached(request.client)
        if not request.commit:
            problem = "adapters, and weights of GPUs that hold parts of a model, are written in place"
            remedy = "Announce with commit: true (sync.stage: false), or use transport gloo."
            raise StagingRefused(problem, key="commit", remedy=remedy)
        attached = self._begin(request)
        task = self._run_on(self._write(request))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._run_on(self._leave(attached, task))
            raise

    def request_like(self, again: SyncAgain) -> SyncRequest:
        """The whole request that ``again`` stands for. Errors: ``UpdateRefused``."""
        attached, known = self._known or (None, None)
        if known is None or known.sync_id != again.like or attached is not self.communicator.attached:
            problem, remedy = "nothing of this name was announced", "Announce the tensors themselves."
            raise UpdateRefused(problem, key="like", remedy=remedy, code="announcement-unknown")
        if again.commit != known.commit and attached is not None and attached.transport == DIRECT:
            problem, remedy = "was to be received elsewhere: staged, or in place", "Announce the tensors themselves."
            raise UpdateRefused(problem, key="like", remedy=remedy, code="announcement-unknown")
        fields = {"sync_id": again.sync_id, "version": again.version, "client": again.client, "commit": again.commit}
        return known.model_copy(update=fields)

    async def commit(self, sync_id: str | None) -> Committed:
        """Make what is staged the served version; completes even if the caller hangs up. Errors: ``UpdateRefused``."""
        staged = self.staged
        if staged is None or sync_id not in (None, staged.sync_id):
            problem = "nothing is staged" if staged is None else f"staged is {staged.sync_id}"
            raise UpdateRefused(problem, key="sync_id", remedy="Sync again.", code="nothing-staged")
        self.staged = None
        began = time.perf_counter()
        num_restarted = await asyncio.shield(self._run_on(self.swap(staged.version)))
        return Committed(staged=staged, commit_s=time.perf_counter() - began, num_restarted=num_restarted)

    async def swap(self, version: int) -> int:
        """Load what the workers hold, while nothing is generated. Returns the number of restarted requests."""
        async with self.pool.quiet(drain_s=self.drain_s) as num_restarted:
            try:
                await self.pool.call_all("rollmatch_load", sorted(self.model.aliases))
                await self._forget_old()
            except WorkerDead:
                raise
            except RollmatchError:
                self.pool.state = BROKEN
                raise
            self.pool.policy_version, self.pool.state = version, SERVING
            return num_restarted

    async def drop(self) -> bool:
        """Throw away what is staged or on its way; whether there was anything."""
        dropped = self.is_busy or self.staged is not None
        self.staged = None
        await self.pool.call_all("rollmatch_drop")
        return dropped

    async def close(self) -> bool:
        """Drop, and leave the group."""
        self.staged = None
        return await self.communicator.close()

    def _begin(self, request: SyncRequest) -> Attached:
        """Check a request before anything is received."""
        attached = self.communicator.check_attached(request.client)
        if self.is_busy or self.staged is not None:
            problem = "an update is on its way" if self.is_busy else "an update is staged"
            remedy = "Commit or drop it first."
            raise UpdateRefused(problem, key="sync_id", remedy=remedy, code="update-in-progress")
        if request.version <= self.pool.policy_version:
            problem = f"is {request.version}, served is {self.pool.policy_version}"
            remedy = "Continue from the highest version of all servers."
            raise UpdateRefused(problem, key="version", remedy=remedy, code="version-not-newer")
        if not self._known_as(request):
            check_sync(request, self.model)
        self.is_busy = True
        return attached

    def _known_as(self, request: SyncRequest) -> SyncRequest | None:
        """The request of the same tensors that the workers got in this group."""
        attached, known = self._known or (None, None)
        is_like = known is not None and request.tensors is known.tensors and attached is self.communicator.attached
        return known if is_like else None

    async def _receive(self, request: SyncRequest, *, in_place: bool = False) -> Staged:
        """What is announced, on all workers, verified and merged.

        ``in_place``: nothing is generated meanwhile; caches are emptied while the bytes travel, workers may wait, and
        they merge as soon as an adapter has arrived.
        """
        began, attached = time.perf_counter(), self.communicator.attached
        if known := self._known_as(request):
            await self.pool.call_all("rollmatch_receive_again", request.sync_id, known.sync_id)
        else:
            await self.pool.call_all("rollmatch_receive", to_wire(plan_of(request, self.model, in_place=in_place)))
        if in_place:
            await self._forget_old()
        digests = agreed(await self.communicator.settle(wait_s=_WAIT_S if in_place else 0.0))
        if any(spec.name not in digests for spec in request.tensors):
            problem = "it was dropped while it ran"
            raise UpdateRefused(problem, key=request.sync_id, remedy="Sync again.", code="sync-dropped")
        check_aliases(digests, self.model)
        if not known and may_repeat(request):
            self._known = attached, request
        return Staged(
            sync_id=request.sync_id,
            version=request.version,
            digests=tuple(digests[spec.name] for spec in request.tensors),
            merged_digests=_merged_in(digests, request) if in_place else await self._merge(request),
            receive_s=time.perf_counter() - began,
        )

    async def _merge(self, request: SyncRequest) -> dict[str, str]:
        """What was staged; returns digests by weight."""
        if request.adapter is None:
            return {}
        plan = merge_plan_of(request.adapter, self.model)
        replies = await self.pool.call_all("rollmatch_merge", to_wire(plan))
        return agreed([reply["digests"] for reply in replies])

    async def _write(self, request: SyncRequest) -> Committed:
        pool = self.pool
        try:
            async with pool.quiet(drain_s=self.drain_s) as num_restarted:
                pool.state = WRITING
                try:
                    staged = await self._receive(request, in_place=True)
                except BaseException:
                    pool.state = BROKEN  # also if the next call fails
                    pool.state = UPDATING if await self._is_whole() else BROKEN
                    raise
                pool.policy_version, pool.state = request.version, SERVING
            return Committed(staged=staged, commit_s=0.0, num_restarted=num_restarted)
        finally:
            self.is_busy = False

    async def _is_whole(self) -> bool:
        """Whether every worker holds weights of one version; forgets what failed."""
        replies = await self.pool.call_all("rollmatch_whole")
        if self.communicator.attached is not None:
            await self.pool.call_all("rollmatch_drop")
        return all(reply["whole"] for reply in replies)

    async def _leave(self, attached: Attached, task: asyncio.Task[Committed]) -> None:
        """The caller is gone: close its group, then forget how its update ended."""
        await self.communicator.close(only=attached)
        with suppress(RollmatchError):
            await task

    async def _forget_old(self) -> None:
        """Empty caches of the old weights. Errors: ``UpdateRefused``."""
        if not await self.pool.reset_caches():
            problem = "the engine would not give up caches of the old weights"
            raise UpdateRefused(problem, key="caches", remedy="Run a full sync.", code="weights-broken")

    def _run_on(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run to the end, whoever waits for it; kept so that it is not collected."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _merged_in(digests: Mapping[str, str], request: SyncRequest) -> dict[str, str]:
    """Those of weights that were merged in place."""
    return {merge.name: digests[merge.name] for merge in (request.adapter.merges if request.adapter else ())}


def agreed(digests: Sequence[dict[str, str]]) -> dict[str, str]:
    """The digests, equal on all workers. Errors: ``DigestMismatch``."""
    first = digests[0]
    for other in digests[1:]:
        for name, digest in first.items():
            if other.get(name) != digest:
                problem = f"workers hold {digest} and {other.get(name)}"
                raise DigestMismatch(problem, key=name, remedy="Sync again.")
    return first


def check_aliases(digests: Mapping[str, str], model: Model) -> None:
    """A tied tensor that is sent, too, equals the one it is tied to. Errors: ``AnnouncementInvalid``."""
    for alias, target in model.aliases.items():
        if alias in digests and digests[alias] != digests.get(target):
            problem, remedy = f"is tied to {target} here, but arrived with other bytes", "Untie them in config.json."
            raise AnnouncementInvalid(problem, key=alias, remedy=remedy, code="digest-mismatch")
