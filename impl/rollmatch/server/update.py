"""Updates of the native dialect: announced at once, staged beside generation, committed as one version."""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from rollmatch.errors import RollmatchError, SyncError
from rollmatch.server.announced import check_aliases, check_sync
from rollmatch.server.communicator import Communicator
from rollmatch.server.engine_pool import BROKEN, SERVING, EnginePool
from rollmatch.server.failures import WorkerDead
from rollmatch.server.identity import Model
from rollmatch.server.payloads import SyncAgain, SyncRequest

_WAIT_S = 0.25
"""Between two looks at what else is asked of a worker that waits."""


class UpdateInProgress(SyncError):
    """One update at a time."""

    code = "update-in-progress"


class VersionNotNewer(SyncError):
    """An update's version is above the one that is served."""

    code = "version-not-newer"


class NothingStaged(SyncError):
    """Only what is staged can be committed."""

    code = "nothing-staged"


class AnnouncementUnknown(SyncError):
    """Only what was announced in full in the open group can be announced by its name."""

    code = "announcement-unknown"


class SyncDropped(SyncError):
    """An update goes on until it is complete, unless somebody drops it."""

    code = "sync-dropped"


class CachesKept(SyncError):
    """Caches of older weights are emptied by a commit."""

    code = "weights-broken"


class WorkersDisagree(SyncError):
    """All workers of a server received the same bytes."""

    code = "digest-mismatch"


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
        self.pool, self.communicator, self.model, self.drain_s = pool, communicator, model, drain_s
        self.staged: Staged | None = None
        self.is_busy = False
        self._announced: tuple[Any, SyncRequest] | None = None
        """What may be announced again by its name, and the attachment in which it was told to the workers."""
        self._cleanups: set[asyncio.Task[Any]] = set()

    async def stage(self, request: SyncRequest) -> Staged:
        """Receive and verify on all workers; what fails leaves no trace.

        Errors: ``UpdateInProgress``, ``VersionNotNewer``, those of ``announced`` and of the workers.
        """
        attached = self.communicator.check_attached(request.client)
        self.check_order(request)
        self.check(request)
        self.is_busy = True
        try:
            self.staged = await self.receive(request)
        except asyncio.CancelledError:  # the learner hung up: its group is of no more use
            self.clean(self.communicator.close(only=attached))
            raise
        except RollmatchError:
            if self.communicator.attached is attached:
                await self.drop()
            raise
        finally:
            self.is_busy = False
        return self.staged

    def request_like(self, again: SyncAgain) -> SyncRequest:
        """The whole request that ``again`` stands for. Errors: ``AnnouncementUnknown``."""
        attached, known = self._announced or (None, None)
        if known is None or known.sync_id != again.like or attached is not self.communicator.attached:
            remedy = "Announce the tensors themselves."
            raise AnnouncementUnknown("nothing of this name was announced", key="like", remedy=remedy)
        told = {"sync_id": again.sync_id, "version": again.version, "client": again.client, "commit": again.commit}
        return known.model_copy(update=told)

    def check(self, request: SyncRequest) -> None:
        """Against the model, unless the same was announced before. Errors: those of ``announced``."""
        if not self._is_known(request):
            check_sync(request, self.model)

    def _is_known(self, request: SyncRequest) -> bool:
        attached, known = self._announced or (None, None)
        return known is not None and request.tensors is known.tensors and attached is self.communicator.attached

    async def receive(self, request: SyncRequest, *, in_place: bool = False) -> Staged:
        """What is announced, on all workers, verified and merged.

        ``in_place``: nothing is generated meanwhile, so that caches are emptied while the bytes travel, and workers may
        wait for them.
        """
        began, wait_s = time.perf_counter(), _WAIT_S if in_place else 0.0
        await self.pool.call_all("rollmatch_receive", self._plan_of(request, in_place=in_place))
        if in_place:
            await self.forget_old()
        digests = agreed(await self.communicator.settle(wait_s=wait_s))
        _check_received(digests, request)
        check_aliases(digests, self.model)
        if may_come_again(request) and not self._is_known(request):
            self._announced = self.communicator.attached, request
        return Staged(
            sync_id=request.sync_id,
            version=request.version,
            digests=tuple(digests[spec.name] for spec in request.tensors),
            merged_digests=await self._merge(request),
            receive_s=time.perf_counter() - began,
        )

    async def commit(self, sync_id: str | None) -> Committed:
        """Make what is staged the served version; goes through to its end even if the caller hangs up.

        Errors: ``NothingStaged``, ``weights-broken``.
        """
        staged = self.staged
        if staged is None or sync_id not in (None, staged.sync_id):
            told = "nothing is staged" if staged is None else f"staged is {staged.sync_id}"
            raise NothingStaged(told, key="sync_id", remedy="Sync again.")
        self.staged = None
        task = asyncio.create_task(self.swap(staged.version))
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
        began = time.perf_counter()
        num_restarted = await asyncio.shield(task)
        return Committed(staged=staged, commit_s=time.perf_counter() - began, num_restarted=num_restarted)

    async def swap(self, version: int) -> int:
        """Load what the workers hold, while nothing is being written. Returns the number of restarted requests."""
        async with self.pool.quiet(drain_s=self.drain_s) as num_restarted:
            try:
                await self.pool.call_all("rollmatch_load", sorted(self.model.aliases))
                await self.forget_old()
            except WorkerDead:
                raise
            except RollmatchError:
                self.pool.state = BROKEN
                raise
            self.pool.policy_version, self.pool.state = version, SERVING
            return num_restarted

    async def forget_old(self) -> None:
        """Empty caches of the old weights. Errors: ``CachesKept``."""
        if not await self.pool.reset_caches():
            problem = "the engine would not give up caches of the old weights"
            raise CachesKept(problem, key="caches", remedy="Run a full sync.")

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

    def _plan_of(self, request: SyncRequest, *, in_place: bool) -> dict[str, Any]:
        """As workers are told of it: by name what they know."""
        if self._is_known(request):
            assert self._announced is not None
            return {"sync_id": request.sync_id, "like": self._announced[1].sync_id}
        about = {"beside": request.adapter is not None, "aliases": sorted(self.model.aliases)} if in_place else {}
        return plan_of(request) | about

    async def _merge(self, request: SyncRequest) -> dict[str, str]:
        if request.adapter is None:
            return {}
        held = [[spec.name, spec.dtype, list(spec.shape)] for spec in self.model.tensors.values()]
        told = await self.pool.call_all("rollmatch_merge", request.adapter.model_dump() | {"model": held})
        return agreed([answer["digests"] for answer in told])

    def check_order(self, request: SyncRequest) -> None:
        if self.is_busy or self.staged is not None:
            told = "is on its way" if self.is_busy else "is staged"
            raise UpdateInProgress(f"an update {told}", key="sync_id", remedy="Commit or drop it first.")
        if request.version <= self.pool.policy_version:
            problem = f"is {request.version}, served is {self.pool.policy_version}"
            raise VersionNotNewer(problem, key="version", remedy="Count on from the highest version of all servers.")

    def clean(self, work: Awaitable[Any]) -> None:
        """Run beside what goes on; kept so that it is not collected."""
        task = asyncio.ensure_future(work)
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)


def plan_of(request: SyncRequest) -> dict[str, Any]:
    return {
        "sync_id": request.sync_id,
        "tensors": [[spec.name, spec.dtype.removeprefix("torch."), list(spec.shape)] for spec in request.tensors],
        "buckets": list(request.buckets),
        "digests": None if request.digests is None else list(request.digests),
        "trailer": request.digests is None,
        "keep": may_come_again(request),
    }


def may_come_again(request: SyncRequest) -> bool:
    """Whether nothing of a request but its version belongs to one sync only."""
    return request.adapter is None and request.digests is None


def _check_received(digests: dict[str, str], request: SyncRequest) -> None:
    if any(spec.name not in digests for spec in request.tensors):
        raise SyncDropped("it was dropped while it ran", key=request.sync_id, remedy="Sync again.")


def agreed(told: list[dict[str, str]]) -> dict[str, str]:
    """The digests, equal on all workers. Errors: ``WorkersDisagree``."""
    first = told[0]
    for other in told[1:]:
        for name, digest in first.items():
            if other.get(name) != digest:
                problem = f"workers hold {digest} and {other.get(name)}"
                raise WorkersDisagree(problem, key=name, remedy="Sync again.")
    return first
