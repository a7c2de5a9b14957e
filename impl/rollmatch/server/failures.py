"""Errors as they leave the server: a status, and a body that names item and field, the same in every dialect."""

from typing import Any

from pydantic import ValidationError

from rollmatch.errors import RollmatchError, RolloutError, SyncError
from rollmatch.server.payloads import Failure


class BadItem(RolloutError):
    """Every item of a generate call can be served; ``item`` is its index in the batch."""

    code = "bad-item"
    status = 400

    def __init__(self, problem: str, *, key: str = "", remedy: str = "", item: int | None = None) -> None:
        super().__init__(problem, key=key, remedy=remedy)
        self.item = item


class SamplingValueInvalid(BadItem):
    """Sampling values lie in the ranges that the engine has."""

    code = "sampling-value-invalid"


class BodyInvalid(RolloutError):
    """A body has the fields and types of its route."""

    code = "body-invalid"
    status = 422


class WorkerDead(RolloutError):
    """Every worker of the server is alive."""

    code = "worker-dead"
    status = 503


class WorkerFailure(SyncError):
    """What a worker told; carries the worker's own code."""

    code = "worker-failure"

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__(told["problem"], key=told["key"], remedy=told["remedy"])
        self.code = told["code"]
        self.status = told["status"]


def status_of(error: RollmatchError) -> int:
    """HTTP status; what has none is a conflict with the server's state."""
    status: int = getattr(error, "status", 409)
    return status


def failure_of(error: RollmatchError) -> Failure:
    """The body."""
    return Failure(
        code=error.code,
        key=error.key,
        item=getattr(error, "item", None),
        problem=error.problem,
        remedy=error.remedy,
        detail=str(error),
    )


def bad_body(error: ValidationError, *, sampling_at: tuple[str, ...] = ("sampling",)) -> RollmatchError:
    """The first thing pydantic found, as an error of ours; a wrong sampling value is one of its own kind."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = first["loc"]
    item = next((part for part in place if isinstance(part, int)), None)
    key = dotted(place)
    if any(name in place for name in sampling_at):
        remedy = "See the route's sampling fields and their ranges."
        return SamplingValueInvalid(f"{first['msg']}", key=str(place[-1]), remedy=remedy, item=item)
    missing = BodyInvalid(f"{first['msg']}", key=key, remedy="See the route's fields.")
    missing.item = item  # type: ignore[attr-defined]
    return missing


def dotted(place: tuple[int | str, ...]) -> str:
    """A pydantic location as people write it.

    >>> dotted(("requests", 1, "images"))
    'requests[1].images'
    """
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
