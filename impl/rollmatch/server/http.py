"""Bodies in, answers out: msgpack or JSON, errors with their fields, callers that hang up."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse, Response

from rollmatch.errors import RollmatchError
from rollmatch.server.failures import BodyInvalid, bad_body, failure_of, status_of
from rollmatch.server.payloads import InferReply

MSGPACK = "application/msgpack"
_MSGPACK_NAMES = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")
_CLOSED_BY_CALLER = 499
_encoder = msgspec.msgpack.Encoder()
_Body = TypeVar("_Body", bound=BaseModel)
_T = TypeVar("_T")


async def read_body(request: Request, kind: type[_Body], *, sampling_at: tuple[str, ...] = ("sampling",)) -> _Body:
    """The body as a payload; none at all counts as an empty one. Errors: ``BodyInvalid``, ``SamplingValueInvalid``."""
    raw = await request.body()
    try:
        decode = msgspec.msgpack.decode if is_msgpack(request) else msgspec.json.decode
        fields: Any = decode(raw) if raw else {}
    except msgspec.DecodeError as error:
        raise BodyInvalid(f"cannot be decoded: {error}", key="body", remedy="See Content-Type.") from error
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise bad_body(error, sampling_at=sampling_at) from error


def is_msgpack(request: Request) -> bool:
    """Whether the caller writes msgpack, and so reads it."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() in _MSGPACK_NAMES


def answer(request: Request, reply: BaseModel | dict[str, Any] | list[Any], *, status: int = 200) -> Response:
    """A reply in the caller's own encoding."""
    if is_msgpack(request):
        fields = reply.model_dump() if isinstance(reply, BaseModel) else reply
        return Response(_encoder.encode(fields), media_type=MSGPACK, status_code=status)
    return Response(msgspec.json.encode(_plain(reply)), media_type="application/json", status_code=status)


def refuse(request: Request, error: RollmatchError) -> Response:
    """An error, as a reply."""
    status = status_of(error)
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
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
