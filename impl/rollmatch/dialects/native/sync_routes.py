"""Routes of weight syncs in the native dialect."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from rollmatch.dialects.native.sync import Committed, NativeSync
from rollmatch.server.http import answer, read_body, unless_gone
from rollmatch.server.openapi import accepts
from rollmatch.server.payloads import SyncAgain, SyncChoice, SyncReply, SyncRequest
from rollmatch.server.state import ServerState
from rollmatch.server.update import Staged
from rollmatch.weights.digest import DIRECT


def sync_routes(server: ServerState) -> APIRouter:
    """All routes below ``/native/sync/``."""
    router, syncs, update = APIRouter(prefix="/native/sync", tags=["native"]), NativeSync(server), server.update

    @router.post("/")
    @accepts(SyncRequest)
    async def sync(request: Request) -> Response:
        return await _sync(request, await read_body(request, SyncRequest), server=server, syncs=syncs)

    @router.post("/again/")
    @accepts(SyncAgain)
    async def again(request: Request) -> Response:
        body = await read_body(request, SyncAgain)
        update.check_attached(body.client)
        return await _sync(request, syncs.request_like(body), server=server, syncs=syncs)

    @router.post("/commit/")
    @accepts(SyncChoice)
    async def commit(request: Request) -> Response:
        choice = await read_body(request, SyncChoice)
        update.check_attached(choice.client)
        return answer(request, _commit_reply(server, await syncs.commit(choice.sync_id)))

    @router.post("/drop/")
    @accepts(SyncChoice)
    async def drop(request: Request) -> Response:
        choice = await read_body(request, SyncChoice)
        update.check_attached(choice.client)
        return answer(request, {"dropped": await syncs.drop()})

    return router


async def _sync(request: Request, body: SyncRequest, *, server: ServerState, syncs: NativeSync) -> Response:
    """Receive, and commit where the request says so."""
    attached = server.update.attached
    # GPUs that hold parts of a model must not wait for each other's data and for the learner's at the same time.
    stages = not body.commit and body.adapter is None and server.settings.tensor_parallel_size == 1
    if attached is not None and attached.transport == DIRECT and not stages:
        written = await unless_gone(request, syncs.write(body))
        return written if isinstance(written, Response) else answer(request, _commit_reply(server, written))
    staged = await unless_gone(request, syncs.stage(body))
    if isinstance(staged, Response):
        return staged
    if not body.commit:
        return answer(request, _sync_reply(server, staged))
    return answer(request, _commit_reply(server, await syncs.commit(body.sync_id)))


def _sync_reply(server: ServerState, staged: Staged) -> SyncReply:
    return SyncReply(
        instance=server.instance,
        policy_version=server.update.policy_version,
        committed=False,
        digests=staged.digests,
        merged_digests=staged.merged_digests,
        receive_s=staged.receive_s,
    )


def _commit_reply(server: ServerState, committed: Committed) -> SyncReply:
    committed_fields = {"committed": True, "commit_s": committed.commit_s, "restarted": committed.num_restarted}
    return _sync_reply(server, committed.staged).model_copy(update=committed_fields)
