"""Bodies in, answers out: msgpack or JSON, errors with their fields, callers that hang up."""

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse, Response

from rollmatch.errors import RollmatchError
from rollmatch.server.access import CONTENT_TYPES
from rollmatch.server.failures import Refusal, bad_body, failure_of, status_of
from rollmatch.server.payloads import InferReply

MSGPACK = "application/msgpack"
_CLOSED_BY_CALLER = 499
_SMALL = 65_536
"""Bytes that are decoded on the event loop; more are decoded in a thread."""
_encoder = msgspec.msgpack.Encoder()
_Body = TypeVar("_Body", bound=BaseModel)
_T = TypeVar("_T")


async def read_body(
    request: Request,
    kind: type[_Body],
    *,
    sampling_at: tuple[str, ...] = ("sampling",),
    longest: Mapping[str, int] | None = None,
) -> _Body:
    """The body as a payload; none at all counts as an empty one.

    ``longest``: field -> most entries, counted before they are validated. Errors: ``Refusal``.
    """
    raw, packed = await request.body(), is_msgpack(request)
    if len(raw) <= _SMALL:
        return _decoded(raw, kind, packed, sampling_at, longest or {})
    return await asyncio.to_thread(_decoded, raw, kind, packed, sampling_at, longest or {})


def _decoded(
    raw: bytes, kind: type[_Body], packed: bool, sampling_at: tuple[str, ...], longest: Mapping[str, int]
) -> _Body:
    try:
        decode = msgspec.msgpack.decode if packed else msgspec.json.decode
        fields: Any = decode(raw) if raw else {}
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refusal(
            f"cannot be decoded: {error}", code="body-invalid", key="body", remedy="See Content-Type."
        ) from error
    for name, limit in longest.items():
        entries = fields.get(name) if isinstance(fields, dict) else None
        if isinstance(entries, list) and len(entries) > limit:
            remedy = "Split the call, or raise custom.extra.rollout_server.limits.max_prompts_per_call."
            raise Refusal(f"{len(entries)} entries, at most {limit}", code="call-too-large", key=name, remedy=remedy)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise bad_body(error, sampling_at=sampling_at) from error
    except RecursionError as error:
        raise Refusal(
            "is nested too deeply", code="body-invalid", key="body", remedy="See the route's fields."
        ) from error


def is_msgpack(request: Request) -> bool:
    """Whether the caller writes msgpack, and so reads it."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() in CONTENT_TYPES[1:]


def answer(request: Request, reply: BaseModel | dict[str, Any] | list[Any], *, status: int = 200) -> Response:
    """A reply in the caller's own encoding."""
    if is_msgpack(request):
        fields = reply.model_dump() if isinstance(reply, BaseModel) else reply
        return Response(_encoder.encode(fields), media_type=MSGPACK, status_code=status)
    return Response(msgspec.json.encode(_plain(reply)), media_type="application/json", status_code=status)


def refuse(request: Request, error: RollmatchError) -> Response:
    """An error as a reply; after a body that was not read to its end, the connection is closed."""
    status = status_of(error)
    headers = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}}.get(status, {})
    if status in (408, 413, 415):
        headers = headers | {"connection": "close"}
    fields = failure_of(error).model_dump()
    if is_msgpack(request):
        return Response(_encoder.encode(fields), media_type=MSGPACK, status_code=status, headers=headers)
    return JSONResponse(fields, status_code=status, headers=headers)


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T | Response:
    """The work's result; cancelled as soon as the caller hangs up. To be called after the body was read."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=_CLOSED_BY_CALLER)
    finally:
        gone.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, RollmatchError):
            await task


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _plain(reply: BaseModel | dict[str, Any] | list[Any]) -> Any:
    """Without bytes, which JSON does not have."""
    if isinstance(reply, InferReply):
        fields = reply.model_dump(exclude={"responses"})
        return fields | {"responses": [response.listed() for response in reply.responses]}
    return reply.model_dump() if isinstance(reply, BaseModel) else reply
