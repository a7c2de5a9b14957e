"""Errors as they leave the server: an HTTP status, and a body that names item and field, the same in every dialect."""

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from rollmatch.errors import RollmatchError, RolloutError, SyncError, first_fault
from rollmatch.server.payloads import Failure

REFUSALS: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        "request-id-repeated": (400, "Request ids are unique within a call."),
        "prompt-missing": (400, "A request holds exactly one prompt: ids, text or messages."),
        "messages-invalid": (400, "Messages are what the chat template accepts."),
        "images-misfit": (400, "A prompt has one placeholder per image."),
        "token-id-invalid": (400, "Every id of a prompt is in the vocabulary."),
        "prompt-too-long": (400, "A prompt and its longest response fit into max_model_len."),
        "sampling-value-invalid": (400, "Sampling values lie in the ranges that the engine has."),
        "engine-refused": (400, "The engine accepts what passed the server's own checks."),
        "structure-refused": (400, "The structure of a response is compiled within limits on time and memory."),
        "image-unreadable": (
            400,
            "An image is a PNG, JPEG, WebP, BMP or GIF that can be decoded, of a shape that the model takes.",
        ),
        "image-url-refused": (
            400,
            "Images by URL are fetched from hosts that the operator named only.",
        ),
        "image-path-outside-roots": (403, "An image path lies below a directory that the operator named."),
        "image-too-large": (413, "Images have at most as many pixels as the limits allow."),
        "body-invalid": (422, "A body has the fields and types of its route, and no others."),
        "call-too-large": (
            422,
            "A call has at most as many prompts, responses, tokens and images as the limits allow.",
        ),
        "body-too-large": (413, "A body has at most as many bytes as the limits allow."),
        "body-too-slow": (408, "A body arrives without long pauses."),
        "content-type-refused": (415, "A body is JSON or msgpack, and its content type says which."),
        "server-busy": (429, "The server accepts work while its queue is not full."),
        "bearer-key-missing": (401, "A server with a key serves only calls with that key."),
        "bearer-key-wrong": (401, "The key is the server's."),
        "host-refused": (403, "A server without a key is called by a loopback name or one of allowed_hosts."),
        "origin-refused": (403, "A server without a key serves no web page of another site."),
        "route-unknown": (404, "A call names a route of this server."),
        "method-not-allowed": (405, "A route is called by its method."),
        "weights-not-set": (409, "A server that was started with placeholder weights is synced before it generates."),
        "weights-broken": (409, "After an update that failed half way, a full sync precedes generation."),
        "policy-changed": (409, "A stream ends under the policy version that it began with."),
        "generation-aborted": (409, "A pause with mode=abort gives up the responses that are being written."),
        "model-unknown": (404, "An OpenAI request names a model that the server has, or none."),
        "openai-unavailable": (
            501,
            "The OpenAI routes need a vLLM whose serving classes can be imported, as 0.26 and 0.32.",
        ),
        "update-in-progress": (409, "Nothing is generated while weights are written in place."),
    }
)
"""Code -> HTTP status and the rule that was broken."""


class Refusal(RolloutError):
    """A call that the server does not serve, by one of the codes in ``REFUSALS``."""

    def __init__(self, problem: str, *, code: str, key: str = "", remedy: str = "", item: int | None = None) -> None:
        super().__init__(problem, key=key, remedy=remedy)
        self.code = code
        self.status = REFUSALS[code][0]
        self.item = item
        """Index of the request in its call; None where the whole call is refused."""


class WorkerDead(RolloutError):
    """A worker process of the server died."""

    code = "worker-dead"
    status = HTTPStatus.SERVICE_UNAVAILABLE


class WorkerFailure(SyncError):
    """An error of a worker, with the worker's own code."""

    code = "worker-failure"

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__(raw["problem"], key=raw["key"], remedy=raw["remedy"])
        self.code = raw["code"]
        self.status = raw["status"]


def status_of(error: RollmatchError) -> int:
    """HTTP status of an error; 409 (a conflict with the server's state) where its class names none."""
    status: int = getattr(error, "status", HTTPStatus.CONFLICT)
    return status


def failure_of(error: RollmatchError) -> Failure:
    """The body of an error's reply."""
    return Failure(
        code=error.code,
        key=error.key,
        item=getattr(error, "item", None),
        problem=error.problem,
        remedy=error.remedy,
        detail=str(error),
    )


def openai_failure_of(error: RollmatchError) -> dict[str, object]:
    """The same as OpenAI's clients read it."""
    kind = "invalid_request_error" if status_of(error) < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return {"message": str(error), "type": kind, "param": error.key or None, "code": error.code}


def bad_body(error: ValidationError, *, sampling_at: tuple[str, ...]) -> Refusal:
    """The first problem that pydantic found; one below a field of ``sampling_at`` is a wrong sampling value."""
    first = first_fault(error)
    place = first["loc"]
    item = next((part for part in place if isinstance(part, int)), None)
    if any(name in place for name in sampling_at):
        remedy = "See the route's sampling fields and their ranges."
        return Refusal(first["msg"], code="sampling-value-invalid", key=str(place[-1]), remedy=remedy, item=item)
    return Refusal(first["msg"], code="body-invalid", key=dotted(place), remedy="See the route's fields.", item=item)


def dotted(place: tuple[int | str, ...]) -> str:
    """A pydantic location as people write it.

    >>> dotted(("requests", 1, "images"))
    'requests[1].images'
    """
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
