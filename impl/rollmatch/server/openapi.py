"""What ``/openapi.json`` says of bodies and failures, from the payloads that validate them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rollmatch.server.http import CONTENT_TYPES, OPENAI
from rollmatch.server.payloads import Failure

_REFERENCE = "#/components/schemas/{model}"
_ACCEPTED = "accepted_body"
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., object])
_Accepted = tuple[type[BaseModel], Sequence[str]]


class OpenAIFailure(Failure):
    """With what OpenAI's clients read."""

    error: dict[str, str | None]


def accepts(
    kind: type[BaseModel], *, content_types: Sequence[str] = CONTENT_TYPES[:2]
) -> Callable[[_Endpoint], _Endpoint]:
    """Decorator of an endpoint: the payload that it reads from its body."""

    def mark(endpoint: _Endpoint) -> _Endpoint:
        setattr(endpoint, _ACCEPTED, (kind, content_types))
        return endpoint

    return mark


def describe(app: FastAPI) -> None:
    """Have ``/openapi.json`` made when it is first read: FastAPI knows no body that an endpoint reads by itself."""

    def openapi() -> dict[str, Any]:
        app.openapi_schema = app.openapi_schema or _described(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _described(app: FastAPI) -> dict[str, Any]:
    described: dict[str, Any] = get_openapi(title=app.title, version=app.version, routes=app.routes)
    bodies = dict(_bodies(app.routes))
    kinds: list[tuple[type[BaseModel], Any]] = [(kind, "validation") for kind in {kind for kind, _ in bodies.values()}]
    failures: list[tuple[type[BaseModel], Any]] = [(Failure, "validation"), (OpenAIFailure, "validation")]
    references, schemas = models_json_schema([*kinds, *failures], ref_template=_REFERENCE)
    described["components"] = {"schemas": schemas["$defs"]}
    for path, operations in described["paths"].items():
        failure = references[failures[path.startswith(OPENAI)]]
        for operation in operations.values():
            content = {CONTENT_TYPES[0]: {"schema": failure}}
            operation["responses"].pop("422", None)  # FastAPI's own form, which no route answers in
            operation["responses"]["default"] = {"description": "A failure", "content": content}
        if path in bodies:
            kind, content_types = bodies[path]
            content = {name: {"schema": references[kind, "validation"]} for name in content_types}
            operations["post"]["requestBody"] = {"content": content, "required": True}
    return described


def _bodies(routes: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, _Accepted]]:
    """(path, what its POST accepts). Newer FastAPI keeps a router that was included as it is."""
    for route in routes:
        if isinstance(route, APIRoute) and hasattr(route.endpoint, _ACCEPTED):
            yield prefix + route.path, getattr(route.endpoint, _ACCEPTED)
        elif hasattr(route, "original_router"):
            yield from _bodies(route.original_router.routes, prefix + route.include_context.prefix)
