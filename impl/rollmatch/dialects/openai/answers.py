"""What vLLM's OpenAI classes return, as replies that name the policy version; what they refuse, as refusals of ours."""

import asyncio
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from jinja2 import TemplateError
from pydantic import BaseModel

from rollmatch.dialects.openai.engine import CallNotes, notes
from rollmatch.errors import kind_and_text
from rollmatch.server.failures import Refusal, openai_failure_of
from rollmatch.server.http import encoded
from rollmatch.server.replica import IMPOSSIBLE

MISREAD = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError, TemplateError,
)  # fmt: skip
"""What vLLM's classes and chat templates raise for senseless bodies; engines raise ``RollmatchError``."""
_DATA, _DONE = "data: ", "[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One of vLLM's serving classes."""

    request_type: Any
    answer: Callable[[Any], Coroutine[Any, Any, Any]]
    """Request -> response, error (with ``error``) or chunks of a stream."""
    misread: tuple[type[Exception], ...]

    async def begin(
        self, fields: Mapping[str, object], call: CallNotes, *, parts: Sequence[list[dict[str, object]]] = ()
    ) -> "dict[str, Any] | CompletionStream":
        """A whole response, or a stream up to its first chunk. Errors: ``Refusal``, ``WorkerDead``.

        ``parts``: content of each message, in place of what is validated: vLLM validates URLs of images, and renders
        decoded ones.
        """
        try:
            request = self.request_type.model_validate(fields)
            for place, content in enumerate(parts):
                if content:
                    request.messages[place]["content"] = content
            answering = self.answer(request)
            reply = await _beside_the_loop(answering, lambda: call.is_written)
            if isinstance(reply, AsyncGenerator):
                return await _begun(reply, call)
        except self.misread as error:
            if call.error is not None:  # ours, which vLLM's classes may have wrapped
                raise call.error from error
            raise _refused(kind_and_text(error), HTTPStatus.BAD_REQUEST) from error
        if hasattr(reply, "error"):
            raise _refused(reply.error.message, reply.error.code)
        return await asyncio.to_thread(_fields_of, reply, call)


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


@types.coroutine
def _beside_the_loop(coroutine: Coroutine[Any, Any, Any], is_long: Callable[[], bool]) -> Generator[Any, Any, Any]:
    """Run a coroutine on the event loop, and in a thread as soon as its steps are long ones."""
    resume: Callable[[], Any] = partial(coroutine.send, None)
    while True:
        step = asyncio.to_thread(_step, resume).__await__() if is_long() else None
        has_ended, value = _step(resume) if step is None else (yield from step)
        if has_ended:
            return value
        try:
            resume = partial(coroutine.send, (yield value))
        except BaseException as error:  # noqa: BLE001  # it is the coroutine's to handle, a cancellation too
            resume = partial(coroutine.throw, error)


def _step(resume: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether the coroutine has ended, with its result; else with what it waits for."""
    try:
        return False, resume()
    except StopIteration as end:
        return True, end.value


def _fields_of(reply: Any, call: CallNotes) -> dict[str, Any]:
    """A response's fields, choice by choice: pydantic keeps the interpreter lock until it is done."""
    choices = [choice.model_dump(exclude={"logprobs"}) for choice in reply.choices]
    of_prompts = {place: prompt_places(rows) for place, rows in call.prompt_logprobs.items()}
    for index, (fields, choice) in enumerate(zip(choices, reply.choices, strict=True)):
        fields["logprobs"] = choice.logprobs and dict(choice.logprobs)
        if of_prompts:
            fields["prompt_logprobs"] = of_prompts[index * len(of_prompts) // len(choices)]
    found: dict[str, Any] = reply.model_dump(exclude={"choices"})
    return found | {"choices": choices}


def condensing(create: Callable[..., BaseModel]) -> Callable[..., BaseModel]:
    """vLLM's method that makes a choice's log-probabilities; where the response is whole, their fields become JSON.

    So one choice at a time is in objects, which take ten times as much memory.
    """

    def condensed(*arguments: object, **named: object) -> BaseModel:
        made = create(*arguments, **named)
        if notes.get().is_streamed:
            return made
        texts: dict[str, Any] = {name: msgspec.Raw(encoded(_plain(field))) for name, field in made}
        return type(made).model_construct(**texts)

    return condensed


def _plain(value: Any) -> Any:
    """``model_dump`` of log-probabilities, in small steps.

    >>> _plain([1, {"a": (2,)}, None])
    [1, {'a': (2,)}, None]
    """
    if isinstance(value, BaseModel):
        return {name: _plain(field) for name, field in value}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def prompt_places(rows: Iterable[Mapping[int, Any]] | None) -> msgspec.Raw | None:
    """vLLM's log-probabilities of prompt tokens, by id, finite, as JSON; the first token has none."""
    if rows is None:
        return None
    text = bytearray(b"[")
    for row in rows:
        text += _place(row) + b","
    text[-1:] = b"]"
    return msgspec.Raw(text)


def _place(row: Mapping[int, Any]) -> bytes:
    entries = {
        str(token_id): {"logprob": max(one.logprob, IMPOSSIBLE), "rank": one.rank, "decoded_token": one.decoded_token}
        for token_id, one in row.items()
    }
    return encoded(entries or None)


def model_unknown(problem: str) -> Refusal:
    """A call names another model than the server's."""
    remedy = "Take a name from /v1/models, or leave model out."
    return Refusal(problem, code="model-unknown", key="model", remedy=remedy)


def _refused(problem: str, status: int) -> Refusal:
    """vLLM's refusal as ours."""
    if status == HTTPStatus.NOT_FOUND:
        return model_unknown(problem)
    return Refusal(problem, code="engine-refused", key="body", remedy="See vLLM's OpenAI server.")
