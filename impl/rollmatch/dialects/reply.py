"""Checks on what servers answer: one entry per request, each with its ids."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, NotRequired, TypedDict, TypeVar

import msgspec

from rollmatch.dialects.http import ReplyMalformed
from rollmatch.dialects.prompt import Reply
from rollmatch.errors import RolloutError

Read = TypeVar("Read")
FINISH_REASONS = ("stop", "length")
_LARGEST = 1 << 63
"""Of integers; still larger ones are no floats."""

Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""Of weights; the next one is a number of 64 bits, too."""


class Health(TypedDict, total=False):
    """What a server says of itself all the time; dialects but ours have little of it."""

    policy_version: Version
    instance: str
    gpus: list[str] | None
    progress: float | None
    calls: dict[str, float]


MODELS = "/v1/models"
"""Route of OpenAI's, where vLLM says what it serves."""


class _ServedModel(TypedDict):
    id: str
    max_model_len: NotRequired[Annotated[int, msgspec.Meta(ge=1)] | None]


class ServedModels(TypedDict):
    """What ``MODELS`` answers."""

    data: Annotated[list[_ServedModel], msgspec.Meta(min_length=1)]


def read_as(kind: type[Read], body: object, *, route: str, base_url: str) -> Read:
    """What a control route answered, without fields that ``kind`` does not have. Errors: ``ReplyMalformed``."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        problem = f"{route} answered what its dialect does not: {error}"
        raise ReplyMalformed(problem, key=base_url, remedy="Is this URL a rollout server's?") from error


def health_of(body: object, *, base_url: str) -> Health:
    """Empty for a server that answers by its status alone. Errors: ``ReplyMalformed``."""
    return read_as(Health, body if isinstance(body, dict) else {}, route="/health", base_url=base_url)


def entries_of(body: object, *, base_url: str, num_requests: int) -> list[object]:
    """The entries of a reply, as many as there were requests. Errors: ``ReplyMalformed``, ``reply-count-mismatch``."""
    if not isinstance(body, list):
        raise ReplyMalformed(f"{base_url} answered {type(body).__name__}, not a list of responses", key=base_url)
    if len(body) != num_requests:
        raise RolloutError(
            f"{base_url} gave {len(body)} answers to {num_requests} requests", code="reply-count-mismatch", key=base_url
        )
    return body


def ids_of(value: object, *, name: str, place: int, base_url: str) -> tuple[int, ...]:
    """A list of token ids. Errors: ``ReplyMalformed``."""
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str | bytes)
        or any(type(item) is not int for item in value)
    ):
        raise ReplyMalformed(
            f"entry {place} of the answer of {base_url} has no {name}",
            key=base_url,
            remedy="The server must return token ids of prompts and responses.",
        )
    return tuple(value)


def logprobs_of(value: Any, ids: Sequence[int], *, place: int, base_url: str) -> tuple[float, ...]:
    """One finite number per response token: by itself, first in a list, or named ``logprob``.

    Errors: ``ReplyMalformed``.
    """
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    numbers = [_number_of(item) for item in value] if is_list else []
    if len(numbers) != len(ids) or not is_list or None in numbers:
        raise ReplyMalformed(
            f"entry {place} of the answer of {base_url} has no log-probability for each of {len(ids)} tokens",
            key=base_url,
            remedy="The server must return the sampled tokens' log-probabilities.",
        )
    return tuple(number for number in numbers if number is not None)


def _number_of(item: object) -> float | None:
    if isinstance(item, dict | list):
        item = field_of(item, "logprob" if isinstance(item, dict) else 0)
    if (isinstance(item, float) and math.isfinite(item)) or (isinstance(item, int) and abs(item) < _LARGEST):
        return float(item)
    return None


def chat_reply_of(body: object, *, version: int | None, place: int, base_url: str) -> Reply:
    """A chat completion with token ids, as vLLM and ms-swift give it. Errors: ``ReplyMalformed``."""
    choice = field_of(body, "choices", 0)
    values = field_of(choice, "logprobs", "content")
    prompt = field_of(body, "prompt_token_ids")
    return replace(_reply_of(choice, prompt, values, place=place, base_url=base_url), policy_version=version)


def completion_reply_of(body: object, *, place: int, base_url: str) -> Reply:
    """A completion of token ids, as vLLM gives it. Errors: ``ReplyMalformed``."""
    choice = field_of(body, "choices", 0)
    prompt, values = field_of(choice, "prompt_token_ids"), field_of(choice, "logprobs", "token_logprobs")
    return _reply_of(choice, prompt, values, place=place, base_url=base_url)


def _reply_of(choice: Any, prompt: Any, values: Any, *, place: int, base_url: str) -> Reply:
    """``values``: log-probabilities of the response's tokens, or None. Errors: ``ReplyMalformed``."""
    prompt_ids = ids_of(prompt, name="prompt_token_ids", place=place, base_url=base_url)
    response = ids_of(field_of(choice, "token_ids"), name="token_ids", place=place, base_url=base_url)
    return Reply(
        prompt_token_ids=filled(prompt_ids, name="prompt_token_ids", place=place, base_url=base_url),
        response_token_ids=response,
        logprobs=None if values is None else logprobs_of(values, response, place=place, base_url=base_url),
        finish_reason=reason_of(field_of(choice, "finish_reason"), place=place, base_url=base_url),
        policy_version=None,
    )


def filled(ids: tuple[int, ...], *, name: str, place: int, base_url: str) -> tuple[int, ...]:
    """Ids that are not empty: a prompt never is. Errors: ``ReplyMalformed``."""
    if not ids:
        raise ReplyMalformed(f"entry {place} of the answer of {base_url} has an empty {name}", key=base_url)
    return ids


def reason_of(value: object, *, place: int, base_url: str) -> str:
    """Why a response ended. Errors: ``ReplyMalformed``."""
    if value not in FINISH_REASONS:
        problem = f"entry {place} of the answer of {base_url} ended by {value!r}, not by stop or length"
        raise ReplyMalformed(problem, key=base_url, remedy="The response is not whole; look at the server's output.")
    return str(value)


def field_of(entry: Any, *names: str | int) -> Any:
    """A value deep inside JSON; None where the way there does not exist.

    >>> field_of({"choices": [{"token_ids": [5]}]}, "choices", 0, "token_ids"), field_of([], 0)
    ([5], None)
    """
    for name in names:
        try:
            entry = entry[name]
        except (KeyError, IndexError, TypeError):
            return None
    return entry
