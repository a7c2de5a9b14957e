"""The FastAPI application: every dialect's routes, one form of errors, one key, one slash rule."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from rollmatch.dialects.native.routes import native_routes
from rollmatch.dialects.queued_routes import queued_routes
from rollmatch.dialects.swift.routes import swift_routes
from rollmatch.dialects.trl.routes import trl_routes
from rollmatch.errors import RollmatchError, RolloutError
from rollmatch.server.failures import failure_of
from rollmatch.server.http import answer, refuse
from rollmatch.server.replica import dead
from rollmatch.server.state import ServerState

_OPEN = ("/health/",)


class BearerKeyMissing(RolloutError):
    """A server with a key serves only calls that bring it."""

    code = "bearer-key-missing"
    status = 401


class BearerKeyWrong(RolloutError):
    """The key is the server's."""

    code = "bearer-key-wrong"
    status = 401


class RouteUnknown(RolloutError):
    """A call names a route of this server."""

    code = "route-unknown"
    status = 404


class MethodNotAllowed(RolloutError):
    """A route is called by its method."""

    code = "method-not-allowed"
    status = 405


def make_app(server: ServerState) -> FastAPI:
    """The application of one server; its engines are closed with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.create_task(server.pool.watch())
        yield
        watch.cancel()
        await asyncio.gather(*(asyncio.to_thread(replica.close) for replica in server.pool.replicas))

    app = FastAPI(title="rollmatch rollout server", lifespan=lifespan, docs_url=None, redoc_url=None)
    for routes in (native_routes, queued_routes, swift_routes, trl_routes):
        app.include_router(routes(server))
    _add_state(app, server)
    _add_errors(app)
    app.add_middleware(_Guard, server=server)
    app.add_middleware(_SlashAtEnd)
    return app


class _SlashAtEnd:
    """Routes are reached with and without their last slash, without a redirect that would cost the body."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not scope["path"].endswith((".json", "/")):
            scope = scope | {"path": scope["path"] + "/"}
        await self.app(scope, receive, send)


class _Guard:
    """Refuses calls without the key, and counts all."""

    def __init__(self, app: Any, *, server: ServerState) -> None:
        self.app, self.key, self.metrics = app, server.settings.api_key, server.metrics

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, statuses = time.perf_counter(), [500]

        async def note(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        request = Request(scope)
        refused = None if self.key is None or scope["path"] in _OPEN else _check_key(request, self.key)
        await (self.app if refused is None else refuse(request, refused))(scope, receive, note)
        route = getattr(scope.get("route"), "path", "unknown")
        self.metrics.requests.labels(route, statuses[-1]).inc()
        self.metrics.seconds.labels(route).observe(time.perf_counter() - began)


def _add_state(app: FastAPI, server: ServerState) -> None:
    @app.get("/health/")
    async def health(request: Request) -> Response:
        pool = server.pool
        told = {
            "status": "ok",
            "state": pool.state,
            "policy_version": pool.policy_version,
            "replicas": len(pool.replicas),
            "world_size": server.settings.world_size,
            "running": pool.num_running,
            "instance": server.instance,
            "gpus": list(server.settings.gpus),
        }
        if pool.is_dead or any(replica.is_dead() for replica in pool.replicas):
            return answer(request, told | failure_of(dead()).model_dump() | {"status": "dead"}, status=503)
        return answer(request, told)

    @app.get("/get_world_size/")
    async def world_size(request: Request) -> Response:
        return answer(request, {"world_size": server.settings.world_size})

    @app.get("/metrics/")
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type=server.metrics.content_type)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RollmatchError)
    async def told(request: Request, error: RollmatchError) -> Response:
        return refuse(request, error)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        kind = MethodNotAllowed if error.status_code == MethodNotAllowed.status else RouteUnknown
        problem = f"{request.method} {request.url.path}: {error.detail}"
        return refuse(request, kind(problem, key=request.url.path, remedy="See /openapi.json."))


def _check_key(request: Request, key: str) -> RolloutError | None:
    kind, _, told = request.headers.get("authorization", "").partition(" ")
    remedy = "Send the header Authorization: Bearer KEY with the key the server was started with."
    if kind.lower() != "bearer" or not told:
        return BearerKeyMissing("the call brings no bearer key", key="authorization", remedy=remedy)
    if not hmac.compare_digest(told.strip().encode(), key.encode()):
        return BearerKeyWrong("the call's bearer key is not this server's", key="authorization", remedy=remedy)
    return None
