"""From settings to a listening server."""

import asyncio
import json
import math
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn

from rollmatch.cli.server_app import make_app
from rollmatch.server.connections import Acceptor, protocol_with
from rollmatch.server.engine_pool import EnginePool
from rollmatch.server.health import health_of
from rollmatch.server.identity import load_model_identity
from rollmatch.server.images import ImageReader
from rollmatch.server.payloads import Sampling
from rollmatch.server.prompts import EnginePrompt, PromptMaker
from rollmatch.server.replica import EngineRequest, VllmReplica
from rollmatch.server.settings import ServerSettings
from rollmatch.server.state import ServerState, assemble

_GRACE_S = 3
_START_POLL_S = 0.01


def serve(settings: ServerSettings, listener: socket.socket) -> None:
    """Start all replicas, listen, and go on until a signal. Errors: ``CheckpointMissing``."""
    os.register_at_fork(
        after_in_child=listener.close
    )  # an engine that outlives the server process must not hold its port
    signal.signal(signal.SIGTERM, _leave)
    asyncio.run(_serve(settings, listener))


async def _serve(settings: ServerSettings, listener: socket.socket) -> None:
    model = load_model_identity(settings.model, dtype=settings.dtype)
    reader = ImageReader(settings.image_roots, settings.limits)
    prompts = PromptMaker(settings.model, vocabulary_size=vocabulary_size(settings.model), reader=reader)
    pool = EnginePool(await start_replicas(settings), weights_set=settings.load_format != "dummy")
    state = assemble(settings, model=model, prompts=prompts, pool=pool)
    where = f"http://{settings.host}:{settings.port}"
    print(f"rollout server ready: {where} ({settings.data_parallel_size} replicas)", file=sys.stderr, flush=True)
    await listen(state, listener)


async def listen(state: ServerState, listener: socket.socket) -> None:
    """Serve until a signal; health is answered by a thread of its own."""
    limits = state.settings.limits
    config = uvicorn.Config(
        make_app(state),
        http=protocol_with(limits),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=math.ceil(limits.idle_timeout_s),
    )
    server = uvicorn.Server(config)
    acceptor = Acceptor(listener, _UvicornLoop(server), limits, health=partial(health_of, state))

    async def accept() -> None:
        while not server.started:
            await asyncio.sleep(_START_POLL_S)
        acceptor.start()

    starting = asyncio.create_task(accept())
    try:
        await server.serve(sockets=[])
    finally:
        starting.cancel()
        acceptor.close()


class _UvicornLoop:
    """uvicorn's side of the connections that the acceptor hands over."""

    def __init__(self, server: uvicorn.Server) -> None:
        self._server, self._loop = server, asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, connection: socket.socket) -> None:
        try:
            self._loop.call_soon_threadsafe(self._adopt, connection)
        except RuntimeError:  # the loop has just been closed
            connection.close()

    def is_open(self) -> bool:
        return not self._server.should_exit

    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def _adopt(self, connection: socket.socket) -> None:
        task = self._loop.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        config = self._server.config
        make = partial(
            cast(Callable[..., asyncio.Protocol], config.http_protocol_class),
            config=config,
            server_state=self._server.server_state,
            app_state=self._server.lifespan.state,
        )
        await self._loop.connect_accepted_socket(make, connection)


async def start_replicas(settings: ServerSettings) -> list[VllmReplica]:
    """All engines, one after the other: each reads its GPUs from the environment, and a fork needs idle threads."""

    def start(index: int) -> VllmReplica:
        return VllmReplica(settings, index=index)

    replicas = [await asyncio.to_thread(start, index) for index in range(settings.data_parallel_size)]
    await asyncio.gather(*(_warm_up(replica) for replica in replicas))
    return replicas


async def _warm_up(replica: VllmReplica) -> None:
    """One token: what vLLM sets up with its first request would keep health waiting for more than a second."""
    prompt = EnginePrompt(token_ids=[0], images=[], expanded_len=1)
    await replica.generate(EngineRequest(prompt=prompt, sampling=Sampling(max_tokens=1), seed=None), "warm-up")


def vocabulary_size(directory: str) -> int:
    """Rows of the embedding, by the model's config."""
    config: dict[str, Any] = json.loads((Path(directory) / "config.json").read_text())
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])


def _leave(number: int, frame: object) -> None:
    """SIGTERM while engines start: go, and the workers, which watch their parent, go too."""
    raise SystemExit(128 + number)
