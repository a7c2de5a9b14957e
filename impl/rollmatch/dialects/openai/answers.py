"""What vLLM's OpenAI classes return, as replies that name the policy version; what they refuse, as refusals of ours."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from jinja2 import TemplateError

from rollmatch.dialects.openai.engine import CallNotes
from rollmatch.server.failures import Refusal, openai_failure_of

MISREAD = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError, TemplateError,
)  # fmt: skip
"""What vLLM's classes and chat templates raise for senseless bodies; engines raise ``RollmatchError``."""
_DATA, _DONE = "data: ", "[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One of vLLM's serving classes."""

    request_type: Any
    answer: Callable[[Any], Any]
    """Request -> response, error (with ``error``) or chunks of a stream."""
    misread: tuple[type[Exception], ...]

    async def begin(self, fields: Mapping[str, object], call: CallNotes) -> "dict[str, Any] | CompletionStream":
        """A whole response, or a stream up to its first chunk. Errors: ``Refusal``, ``WorkerDead``."""
        try:
            reply = await self.answer(self.request_type.model_validate(fields))
            if isinstance(reply, AsyncGenerator):
                return await _begun(reply, call)
        except self.misread as error:
            raise _refused(f"{type(error).__name__}: {error}", HTTPStatus.BAD_REQUEST) from error
        if hasattr(reply, "error"):
            raise _refused(reply.error.message, reply.error.code)
        response: dict[str, Any] = reply.model_dump()
        return response


class CompletionStream:
    """Chunks of a response that has begun."""

    def __init__(self, first: str, rest: AsyncGenerator[str]) -> None:
        self._first, self._rest = first, rest

    async def chunks(self, call: CallNotes, n: int) -> AsyncGenerator[str]:
        """Server-sent events, each with its version."""
        async with aclosing(self._rest):
            yield _versioned(self._first, call, n)
            async for chunk in self._rest:
                yield _versioned(chunk, call, n)
                await asyncio.sleep(0)  # neither a backlog of chunks nor sending them gives others a turn


def with_versions(fields: dict[str, Any], call: CallNotes, n: int) -> dict[str, Any]:
    """A response or a chunk with the version of each choice, and the oldest of all; ``n`` choices are one prompt's.

    >>> with_versions({"choices": [{"index": 1}]}, CallNotes(versions={0: 3, 1: 4}), 1)
    {'choices': [{'index': 1, 'policy_version': 4}], 'policy_version': 3}
    """
    choices = [choice | {"policy_version": call.versions[choice["index"] // n]} for choice in fields["choices"]]
    return fields | {"choices": choices, "policy_version": min(call.versions.values())}


async def _begun(chunks: AsyncGenerator[str], call: CallNotes) -> CompletionStream:
    first = await anext(chunks)
    if call.error is not None:
        raise call.error
    failure = msgspec.json.decode(first.removeprefix(_DATA)).get("error")
    if failure is not None:
        raise _refused(failure["message"], failure["code"])
    return CompletionStream(first, chunks)


def _versioned(chunk: str, call: CallNotes, n: int) -> str:
    text = chunk.removeprefix(_DATA).strip()
    if text == _DONE:
        return chunk
    fields: dict[str, Any] = msgspec.json.decode(text)
    if "error" not in fields:
        fields = with_versions(fields, call, n)
    elif call.error is not None:
        fields = {"error": openai_failure_of(call.error)}
    return f"{_DATA}{msgspec.json.encode(fields).decode()}\n\n"


def model_unknown(problem: str) -> Refusal:
    """A call names another model than the server's."""
    remedy = "Take a name from /v1/models, or leave model out."
    return Refusal(problem, code="model-unknown", key="model", remedy=remedy)


def _refused(problem: str, status: int) -> Refusal:
    """vLLM's refusal as ours."""
    if status == HTTPStatus.NOT_FOUND:
        return model_unknown(problem)
    return Refusal(problem, code="engine-refused", key="body", remedy="See vLLM's OpenAI server.")
