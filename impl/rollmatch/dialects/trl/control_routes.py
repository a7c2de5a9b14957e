"""Control routes of the trl dialect, shared by swift. Unlike elsewhere, status 200 means that it was done."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from rollmatch.dialects.trl.bodies import CommunicatorInit, FlatBucket, FlatTensor, NamedParam
from rollmatch.server.announced import AnnouncementInvalid
from rollmatch.server.http import answer, read_body
from rollmatch.server.openapi import accepts
from rollmatch.server.payloads import TensorSpec
from rollmatch.server.state import ServerState
from rollmatch.weights.group_address import GroupAddress, is_wildcard
from rollmatch.weights.plan import DTYPES, Spec

JOIN_TIMEOUT_S = 60.0
"""Until the learner of another trainer has joined the group that it had opened."""
TRANSFER_TIMEOUT_S = 30.0
"""Until a tensor that such a learner has announced is there."""


def control_routes(server: ServerState) -> APIRouter:
    """Routes that swift and trl trainers share."""
    router = APIRouter(tags=["swift", "trl"])
    _add_group(router, server)
    _add_updates(router, server)
    _add_resets(router, server)
    return router


def _add_group(router: APIRouter, server: ServerState) -> None:
    @router.post("/init_communicator/")
    @accepts(CommunicatorInit)
    async def init(request: Request) -> Response:
        body = await read_body(request, CommunicatorInit)
        host = server.settings.host if is_wildcard(body.host) else body.host  # what TRL and ms-swift send by default
        address = GroupAddress(
            host=host,
            port=body.port,
            rank=0,
            world_size=body.world_size,
            timeout_s=TRANSFER_TIMEOUT_S,
            join_timeout_s=JOIN_TIMEOUT_S,
        )
        await server.chunked.open(address)
        return _done(request, f"listening at {host}:{body.port}, waiting for rank {body.world_size - 1}")

    @router.post("/close_communicator/")
    async def close(request: Request) -> Response:
        return _done(request, "communicator closed" if await server.chunked.close() else "no communicator was open")


def _add_updates(router: APIRouter, server: ServerState) -> None:
    @router.post("/update_named_param/")
    @accepts(NamedParam)
    async def named(request: Request) -> Response:
        body = await read_body(request, NamedParam)
        await server.chunked.announce([spec_of_entry(body)])
        return _done(request, f"ready to receive {body.name}")

    @router.post("/update_flattened_params/")
    @accepts(FlatBucket)
    async def flattened(request: Request) -> Response:
        bucket = await read_body(request, FlatBucket)
        check_places(bucket.metadatas)
        await server.chunked.announce([spec_of_entry(entry) for entry in bucket.metadatas])
        return _done(request, f"ready to receive {len(bucket.metadatas)} tensors")

    @router.post("/process_weights_after_loading/")
    async def process(request: Request) -> Response:
        await server.chunked.settle()
        return _done(request, "Weights processed after loading")


def _add_resets(router: APIRouter, server: ServerState) -> None:
    @router.post("/get_num_background_tasks/")
    async def pending(request: Request) -> Response:  # trainers of verifiers 0.1.x poll it after an update
        return answer(request, {"num_background_tasks": int(server.chunked.is_following)})

    async def reset(request: Request) -> Response:
        await server.chunked.settle()
        done = await server.pool.reset_caches()
        return answer(request, {"message": f"caches reset, status: {done}", "success": done})

    for name in ("prefix", "encoder", "mm"):
        router.post(f"/reset_{name}_cache/", name=f"reset_{name}_cache")(reset)


def check_places(tensors: list[FlatTensor]) -> None:
    """Places count bytes, one tensor after the other from 0. Errors: ``AnnouncementInvalid``."""
    end = 0
    remedy = "Write places in bytes, as ms-swift does since 4.2, one tensor after the other."
    if not tensors:
        remedy = "Announce at least one tensor."
        raise AnnouncementInvalid("names no tensor", key="metadatas", remedy=remedy, code="bucket-invalid")
    for place, tensor in enumerate(tensors):
        spec = Spec(tensor.name, tensor.dtype.removeprefix("torch."), tensor.shape)
        size = spec.num_bytes if spec.dtype in DTYPES else 0
        if (tensor.start_idx, tensor.end_idx) != (end, end + size):
            problem = f"{tensor.name} lies at {tensor.start_idx}:{tensor.end_idx}, expected {end}:{end + size}"
            raise AnnouncementInvalid(problem, key=f"metadatas[{place}]", remedy=remedy, code="bucket-invalid")
        end += size


def spec_of_entry(entry: NamedParam) -> TensorSpec:
    """As the server compares it."""
    return TensorSpec(name=entry.name, dtype=entry.dtype.removeprefix("torch."), shape=entry.shape)


def _done(request: Request, message: str) -> Response:
    return answer(request, {"message": message})
