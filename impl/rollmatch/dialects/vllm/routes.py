"""vLLM's routes for weights and pauses: what ``vllm serve`` offers trainers, TRL 1.11 and newer among them.

Every call ends when what it asks for is done. Sources: vLLM 0.32 ``entrypoints/rl/online/api_router.py``,
``distributed/weight_transfer/nccl_common.py``, TRL 1.16 ``generation/vllm_client.py``.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from rollmatch.dialects.vllm.bodies import FinishBody, InitBody, PauseQuery, StartBody, UpdateBody, WeightVersionBody
from rollmatch.dialects.vllm.update import StockUpdate
from rollmatch.server.http import answer, read_body, unless_gone
from rollmatch.server.openapi import accepts
from rollmatch.server.settings import ServerSettings
from rollmatch.server.state import ServerState
from rollmatch.server.update import Event, Hold, UpdateState


def vllm_routes(server: ServerState) -> APIRouter:
    """The routes of this dialect; what generates is ``openai_routes``."""
    router = APIRouter(tags=["vllm"])
    updates = StockUpdate(server)
    _add_group(router, updates)
    _add_updates(router, updates)
    _add_versions(router, server.update)
    _add_pauses(router, server)

    @router.get("/server_info/")
    async def info(request: Request) -> Response:
        return answer(request, {"vllm_config": vllm_config(server.settings)})

    return router


def vllm_config(settings: ServerSettings) -> dict[str, Any]:
    """What trainers read of a server's configuration."""
    return {
        "model_config": {
            "model": settings.model,
            "dtype": f"torch.{settings.dtype}",
            "max_model_len": settings.max_model_len,
            "logprobs_mode": "processed_logprobs",
        },
        "parallel_config": {
            "tensor_parallel_size": settings.tensor_parallel_size,
            "data_parallel_size": settings.data_parallel_size,
        },
        "lora_config": None,  # adapters are merged, so a trainer sends all weights
        "weight_transfer_config": {"backend": "nccl" if settings.gpus else "gloo"},
    }


def _add_group(router: APIRouter, updates: StockUpdate) -> None:
    @router.post("/init_weight_transfer_engine/")
    @accepts(InitBody)
    async def init(request: Request) -> Response:
        body = await read_body(request, InitBody)
        return await _done(request, updates.open(body.init_info), "Weight transfer initialized")

    @router.post("/shutdown_weight_transfer_engine/")
    async def shutdown(request: Request) -> Response:
        await updates.close()
        return answer(request, {"message": "Weight transfer shut down"})


def _add_updates(router: APIRouter, updates: StockUpdate) -> None:
    @router.post("/start_weight_update/")
    @accepts(StartBody)
    async def start(request: Request) -> Response:
        await read_body(request, StartBody)
        return await _done(request, updates.start(), "Weight update started")

    @router.post("/update_weights/")
    @accepts(UpdateBody)
    async def update(request: Request) -> Response:
        body = await read_body(request, UpdateBody)
        return await _done(request, updates.receive(body.update_info), "Weights updated")

    @router.post("/finish_weight_update/")
    @accepts(FinishBody)
    async def finish(request: Request) -> Response:
        body = await read_body(request, FinishBody)
        return await _done(request, updates.finish(body.weight_version), "Weight update finished")


def _add_versions(router: APIRouter, update: UpdateState) -> None:
    @router.get("/weight_info/")
    async def info(request: Request) -> Response:
        return answer(request, {"weight_version": update.name_of(update.policy_version)})

    @router.post("/update_weight_version/")
    @accepts(WeightVersionBody)
    async def name(request: Request) -> Response:
        body = await read_body(request, WeightVersionBody)
        update.name_version(body.new_version)
        return answer(request, {"success": True, "new_version": body.new_version})


def _add_pauses(router: APIRouter, server: ServerState) -> None:
    update, pool = server.update, server.pool

    @router.post("/pause/")
    async def pause(request: Request, query: Annotated[PauseQuery, Query()]) -> Response:
        update.fire(Event.HELD)
        if query.mode == "abort":
            await pool.abort()
        await pool.drain(within_s=None if query.mode == "wait" else 0.0)
        if query.clear_cache:
            await pool.reset_caches()
        return answer(request, {"status": "paused"})

    @router.post("/resume/")
    async def resume(request: Request) -> Response:
        update.fire(Event.RELEASED)
        return answer(request, {"status": "resumed"})

    @router.get("/is_paused/")
    async def is_paused(request: Request) -> Response:
        return answer(request, {"is_paused": update.hold is Hold.HELD})


async def _done(request: Request, work: Any, message: str) -> Response:
    """Once the work is; without its caller it is given up."""
    gone = await unless_gone(request, work)
    return gone if isinstance(gone, Response) else answer(request, {"message": message})
