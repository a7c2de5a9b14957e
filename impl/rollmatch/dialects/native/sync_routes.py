"""Weight syncs of the native dialect, as a server answers them: announced at once, received as one version.

Staged weights (gloo) are received beside generation, and committed later or in the same call; generation pauses for the
commit only. Weights in place (direct) are written as ``in_place`` says.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from rollmatch.errors import RollmatchError
from rollmatch.server.announced import check_sync, may_repeat, merge_plan_of, plan_of
from rollmatch.server.communicator import Attached, UpdateRefused, agreed, check_aliases
from rollmatch.server.http import answer, read_body, unless_gone
from rollmatch.server.openapi import accepts
from rollmatch.server.payloads import SyncAgain, SyncChoice, SyncReply, SyncRequest
from rollmatch.server.state import ServerState
from rollmatch.weights.digest import DIRECT
from rollmatch.weights.transfer_plan import to_wire

_WAIT_S = 0.25
"""How long a worker may wait before it looks for other requests."""


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
    """Receives, stages, commits and drops; one update at a time."""

    def __init__(self, server: ServerState) -> None:
        self.pool, self.communicator, self.model = server.pool, server.communicator, server.model
        self.staged: Staged | None = None
        self.is_busy = False
        self._known: tuple[Attached | None, SyncRequest] | None = None
        """A request that may be named again, and the group in which the workers got it."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def stage(self, request: SyncRequest) -> Staged:
        """Receive and verify on all workers; a failure leaves no trace.

        Errors: ``UpdateRefused``, those of ``announced`` and of the workers.
        """
        attached = self.begin(request)
        try:
            self.staged = await self.receive(request, in_place=False)
        except asyncio.CancelledError:  # the learner hung up: its group is of no more use
            self.run_on(self.communicator.close(only=attached))
            raise
        except RollmatchError:
            if self.communicator.attached is attached:
                await self.drop()
            raise
        finally:
            self.is_busy = False
        return self.staged

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
        num_restarted = await asyncio.shield(self.run_on(self.communicator.swap(staged.version)))
        return Committed(staged=staged, commit_s=time.perf_counter() - began, num_restarted=num_restarted)

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

    def begin(self, request: SyncRequest) -> Attached:
        """Check a request before anything is received. Errors: ``UpdateRefused``, those of ``announced``."""
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

    async def receive(self, request: SyncRequest, *, in_place: bool) -> Staged:
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
            await self.communicator.forget_old()
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

    def run_on(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run to the end, whoever waits for it; kept so that it is not collected."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _merged_in(digests: Mapping[str, str], request: SyncRequest) -> dict[str, str]:
    """Those of weights that were merged in place."""
    return {merge.name: digests[merge.name] for merge in (request.adapter.merges if request.adapter else ())}


WriteInPlace = Callable[[SyncRequest], Coroutine[None, None, Committed]]
"""``InPlaceUpdate.write``."""


def sync_routes(server: ServerState, update: Update, write_in_place: WriteInPlace) -> APIRouter:
    """All routes below ``/native/sync/``."""
    router, communicator = APIRouter(prefix="/native/sync", tags=["native"]), server.communicator

    async def take(request: Request, body: SyncRequest) -> Response:
        return await _sync(request, body, server=server, update=update, write_in_place=write_in_place)

    @router.post("/")
    @accepts(SyncRequest)
    async def sync(request: Request) -> Response:
        return await take(request, await read_body(request, SyncRequest))

    @router.post("/again/")
    @accepts(SyncAgain)
    async def again(request: Request) -> Response:
        body = await read_body(request, SyncAgain)
        communicator.check_attached(body.client)
        return await take(request, update.request_like(body))

    @router.post("/commit/")
    @accepts(SyncChoice)
    async def commit(request: Request) -> Response:
        choice = await read_body(request, SyncChoice)
        communicator.check_attached(choice.client)
        return answer(request, _commit_reply(server, await update.commit(choice.sync_id)))

    @router.post("/drop/")
    @accepts(SyncChoice)
    async def drop(request: Request) -> Response:
        choice = await read_body(request, SyncChoice)
        communicator.check_attached(choice.client)
        return answer(request, {"dropped": await update.drop()})

    return router


async def _sync(
    request: Request, body: SyncRequest, *, server: ServerState, update: Update, write_in_place: WriteInPlace
) -> Response:
    """Receive, and commit where the request says so."""
    attached = server.communicator.attached
    # GPUs that hold parts of a model must not wait for each other's data and for the learner's at the same time.
    stages = not body.commit and body.adapter is None and server.settings.tensor_parallel_size == 1
    if attached is not None and attached.transport == DIRECT and not stages:
        written = await unless_gone(request, write_in_place(body))
        return written if isinstance(written, Response) else answer(request, _commit_reply(server, written))
    staged = await unless_gone(request, update.stage(body))
    if isinstance(staged, Response):
        return staged
    if not body.commit:
        return answer(request, _sync_reply(server, staged))
    return answer(request, _commit_reply(server, await update.commit(body.sync_id)))


def _sync_reply(server: ServerState, staged: Staged) -> SyncReply:
    return SyncReply(
        instance=server.instance,
        policy_version=server.pool.policy_version,
        committed=False,
        digests=staged.digests,
        merged_digests=staged.merged_digests,
        receive_s=staged.receive_s,
    )


def _commit_reply(server: ServerState, committed: Committed) -> SyncReply:
    committed_fields = {"committed": True, "commit_s": committed.commit_s, "restarted": committed.num_restarted}
    return _sync_reply(server, committed.staged).model_copy(update=committed_fields)
