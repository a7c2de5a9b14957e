"""Bodies as payloads: decoded, counted and validated; large ones in a process that may die.

Decoders and pydantic hold Python's interpreter lock and build whatever a body says: 3 MiB of ``{},`` took 4 GB. So a
process with limits on memory and time reads large bodies, and nothing is validated before it is counted.
"""

import asyncio
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import msgspec
import psutil
from pydantic import BaseModel, ValidationError

from rollmatch.server.failures import Refusal, bad_body
from rollmatch.server.workers import DIED, TOO_SLOW, Workers

SMALL_BYTES = 65_536
"""Bodies that are read on the event loop; larger ones are read in another process."""
MAX_CONTAINERS = 1_048_576
"""Lists and objects of one body: twice those of an announcement of 250,000 tensors."""
MAX_DEPTH = 64
"""Of lists and objects in each other."""
READ_S = 60.0
"""Longest time for one body."""
_SPARE_BYTES, _BYTES_PER_BYTE = 768 << 20, 6
"""Memory of the process above what it holds at its start: for modules, and for each byte of the largest body."""
_NUM_PROCESSES = 2
_REMEDY = "Split the call."
_Body = TypeVar("_Body", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a body is written and what it is."""

    kind: type[BaseModel]
    packed: bool
    """msgpack, not JSON."""
    sampling_at: tuple[str, ...]
    """Fields with sampling values."""
    longest: Mapping[str, int]
    """Field -> most entries."""


async def read(raw: bytes, form: Form, *, max_bytes: int) -> BaseModel:
    """A body as its payload. Errors: ``Refusal``."""
    if len(raw) <= SMALL_BYTES:
        return decode(raw, form)
    future = _readers(max_bytes).schedule(_outcome, raw, form, timeout_s=READ_S)
    try:
        outcome = await asyncio.wrap_future(future)
    except DIED as error:
        raise _too_large("it takes too much memory to be read") from error
    except TOO_SLOW as error:
        raise _too_large(f"it takes longer than {READ_S:g} s to be read") from error
    if isinstance(outcome, BaseModel):
        return outcome
    raise Refusal(**outcome)


def decode(raw: bytes, form: Form) -> BaseModel:
    """A body as its payload, here and now. Errors: ``Refusal``."""
    try:
        read_from = msgspec.msgpack.decode if form.packed else msgspec.json.decode
        fields: object = read_from(raw) if raw else {}
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refusal(
            f"cannot be decoded: {error}", code="body-invalid", key="body", remedy="See Content-Type."
        ) from error
    for name, limit in form.longest.items():
        entries = fields.get(name) if isinstance(fields, dict) else None
        if isinstance(entries, list) and len(entries) > limit:
            remedy = "Split the call, or raise custom.extra.rollout_server.limits.max_prompts_per_call."
            raise Refusal(f"{len(entries)} entries, at most {limit}", code="call-too-large", key=name, remedy=remedy)
    _count(fields)
    try:
        return form.kind.model_validate(fields)
    except ValidationError as error:
        raise bad_body(error, sampling_at=form.sampling_at) from error


def _count(value: object) -> None:
    """Raise ``call-too-large`` where a value has too many lists and objects, or too many in each other."""
    level, depth, num = [value], 0, 0
    while level:
        level = [each for each in level if isinstance(each, dict | list)]
        num, depth = num + len(level), depth + bool(level)
        if num > MAX_CONTAINERS:
            raise _too_large(f"has more than {MAX_CONTAINERS} lists and objects")
        if depth > MAX_DEPTH:
            raise _too_large(f"has lists and objects in each other more than {MAX_DEPTH} deep")
        level = [each for one in level for each in _entries(one)]


def _entries(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_large(problem: str) -> Refusal:
    return Refusal(problem, code="call-too-large", key="body", remedy=_REMEDY)


@cache
def _readers(max_bytes: int) -> Workers:
    return Workers(_NUM_PROCESSES, begin=_limit_memory, arguments=(max_bytes,))


def _limit_memory(max_bytes: int) -> None:
    """In the process, when it starts."""
    held = psutil.Process().memory_info().data  # much where the process that forked it has imported much
    limit = held + _SPARE_BYTES + _BYTES_PER_BYTE * max_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _outcome(raw: bytes, form: Form) -> BaseModel | dict[str, Any]:
    """In the process: a payload, or the fields of a refusal."""
    try:
        return decode(raw, form)
    except Refusal as refusal:
        fields = ("problem", "code", "key", "remedy", "item")
        return {name: getattr(refusal, name) for name in fields}
