"""From settings to a listening server."""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from rollmatch.cli.server_app import make_app
from rollmatch.server.connections import listen
from rollmatch.server.engine_pool import EnginePool
from rollmatch.server.health import health_of
from rollmatch.server.identity import load_model_identity
from rollmatch.server.images import ImageReader
from rollmatch.server.payloads import Sampling
from rollmatch.server.prompts import EnginePrompt, PromptMaker
from rollmatch.server.replica import EngineRequest, VllmReplica, dead
from rollmatch.server.settings import ServerSettings
from rollmatch.server.state import ServerState, assemble

DEAD_GRACE_S = 5.0
"""How long a server without one of its workers still says so."""
_DEAD_POLL_S, _LONGEST_END_S = 0.5, 30.0


def serve(settings: ServerSettings, listener: socket.socket) -> None:
    """Start all replicas, then serve until a signal. Errors: ``CheckpointMissing``, ``WorkerDead``."""
    os.register_at_fork(
        after_in_child=listener.close
    )  # an engine that outlives the server process must not hold its port
    signal.signal(signal.SIGTERM, _leave)
    with asyncio.Runner() as runner:
        state = runner.run(_start(settings))
        where = f"http://{settings.host}:{settings.port}"
        print(f"rollout server ready: {where} ({settings.data_parallel_size} replicas)", file=sys.stderr, flush=True)
        try:
            runner.run(_listen(state, listener, settings))
        except SystemExit:
            if state.pool.is_dead:
                raise dead() from None
            raise


async def _listen(state: ServerState, listener: socket.socket, settings: ServerSettings) -> None:
    """Serve until a signal, or until a worker has died."""
    ending = asyncio.create_task(_end_when_dead(state.pool))
    try:
        await listen(make_app(state), listener, settings.limits, health=partial(health_of, state))
    finally:
        ending.cancel()


async def _end_when_dead(pool: EnginePool) -> None:
    """End a server that cannot generate any more, as a signal would, after its callers could learn why."""
    while not pool.is_dead:
        await asyncio.sleep(_DEAD_POLL_S)
    await asyncio.sleep(DEAD_GRACE_S)
    at_last = threading.Timer(_LONGEST_END_S, os._exit, (1,))  # what closes engines may wait for the dead one
    at_last.daemon = True
    at_last.start()
    signal.raise_signal(signal.SIGTERM)


async def _start(settings: ServerSettings) -> ServerState:
    load_model_identity(settings.model, dtype=settings.dtype)  # fails before engines are started
    reader = ImageReader(settings.image_roots, settings.limits, domains=settings.allowed_media_domains)
    prompts = PromptMaker(settings.model, vocabulary_size=vocabulary_size(settings.model), reader=reader)
    replicas = await start_replicas(settings)
    model = load_model_identity(settings.model, dtype=replicas[0].dtype)  # settings may say auto or half
    pool = EnginePool(replicas, weights_set=settings.load_format != "dummy")
    return assemble(settings, model=model, prompts=prompts, pool=pool)


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
