"""The FastAPI application: the routes of every dialect, one form of errors, one key, one slash rule."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from rollmatch.dialects.native.routes import native_routes
from rollmatch.dialects.openai.routes import openai_routes
from rollmatch.dialects.openai.token_routes import token_routes
from rollmatch.dialects.swift.routes import swift_routes
from rollmatch.dialects.trl.control_routes import control_routes
from rollmatch.dialects.trl.routes import trl_routes
from rollmatch.dialects.vllm.routes import vllm_routes
from rollmatch.errors import RollmatchError
from rollmatch.server.failures import Refusal, dotted
from rollmatch.server.health import health_of
from rollmatch.server.http import Gate, SlashAtEnd, answer, refuse
from rollmatch.server.openapi import describe
from rollmatch.server.state import ServerState

ROUTES = (native_routes, control_routes, swift_routes, trl_routes, openai_routes, token_routes, vllm_routes)
"""A dialect's routes are added here."""


def make_app(server: ServerState) -> FastAPI:
    """The application of one server; its engines are closed with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watches = [asyncio.create_task(work) for work in (server.pool.watch(), server.metrics.watch_turns())]
        yield
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*(asyncio.to_thread(replica.close) for replica in server.pool.replicas))

    app = FastAPI(title="rollmatch rollout server", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.limits = server.settings.limits
    for routes in ROUTES:
        app.include_router(routes(server))
    _add_state(app, server)
    _add_errors(app)
    describe(app)
    app.add_middleware(Gate, server=server)
    app.add_middleware(SlashAtEnd)
    return app


def _add_state(app: FastAPI, server: ServerState) -> None:
    @app.get("/health/")
    async def health(request: Request) -> Response:
        status, about = health_of(server)
        return answer(request, about, status=status)

    @app.get("/get_world_size/")
    async def world_size(request: Request) -> Response:
        return answer(request, {"world_size": server.settings.world_size})

    @app.get("/metrics/")
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type=server.metrics.content_type)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RollmatchError)
    async def failed(request: Request, error: RollmatchError) -> Response:
        return refuse(request, error)

    @app.exception_handler(RequestValidationError)
    async def misread(request: Request, error: RequestValidationError) -> Response:
        """Of what stands behind ``?``; routes read bodies by themselves."""
        first = error.errors()[0]
        remedy = "See /openapi.json."
        return refuse(request, Refusal(first["msg"], code="body-invalid", key=dotted(first["loc"][1:]), remedy=remedy))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        code = "method-not-allowed" if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED else "route-unknown"
        path = request.scope["path"]
        problem = f"{request.method} {path}: {error.detail}"
        return refuse(request, Refusal(problem, code=code, key=path, remedy="See /openapi.json."))
