"""From settings to a listening server."""

import asyncio
import ctypes
import gc
import json
import os
import socket
import sys
import time
from dataclasses import replace
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

from rollmatch.serve.app import make_app
from rollmatch.serve.shutdown import Shutdown, kill_children
from rollmatch.server.connections import listen
from rollmatch.server.engine_pool import EnginePool
from rollmatch.server.health import health_of
from rollmatch.server.identity import load_model_identity
from rollmatch.server.images import ImageReader
from rollmatch.server.payloads import Sampling
from rollmatch.server.prompts import EnginePrompt, GenerateRequest, PromptMaker
from rollmatch.server.replica import VllmReplica, dead
from rollmatch.server.settings import ServerSettings
from rollmatch.server.state import ServerState, assemble

_COLLECT_AFTER = (10_000, 50, 1_000)
"""Objects, and collections of younger ones, after which Python looks for cycles: a call with log-probabilities makes
millions of objects, none of them in a cycle.
"""
_M_MMAP_THRESHOLD, _RETURNED_FROM = -3, 1 << 20
DEAD_CODE = 1
"""Exit code of a server that ended because a worker had died."""
_START_POLL_S = 0.02
DEAD_GRACE_S = 5.0
"""How long a server without one of its workers still says so."""


def serve(settings: ServerSettings, listener: socket.socket, shutdown: Shutdown) -> None:
    """Start all replicas; serve until ``shutdown`` or a worker's end.

    Errors: ``checkpoint-missing``, ``WorkerDead``.
    """
    # An engine that outlives the server process must not hold its port.
    os.register_at_fork(after_in_child=listener.close)
    os.register_at_fork(after_in_child=shutdown.forget_in_child)
    with asyncio.Runner() as runner:
        state = runner.run(_start(settings))
        gc.collect()
        gc.freeze()  # what is loaded stays: a collection that looks at all of it holds the event loop
        gc.set_threshold(*_COLLECT_AFTER)
        _return_large_blocks()
        shutdown.begin_serving()
        where = f"http://{settings.host}:{settings.port}"
        print(f"rollout server ready: {where} ({settings.data_parallel_size} replicas)", file=sys.stderr, flush=True)
        ending = runner.get_loop().create_task(_end_when_dead(state.pool, shutdown))
        app, health = make_app(state), partial(health_of, state)
        runner.run(listen(app, listener, settings.limits, health=health, is_ending=shutdown.is_requested))
        ending.cancel()
    if shutdown.exit_code == DEAD_CODE:
        raise dead()


def _return_large_blocks() -> None:
    """Give blocks of 1 MiB and more back to the system as soon as they are freed: glibc keeps those of up to 32 MiB,
    so that decoded images would leave gigabytes behind. After the engines were forked, which have allocators of their
    own.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _RETURNED_FROM)


async def _end_when_dead(pool: EnginePool, shutdown: Shutdown) -> None:
    """End a server that cannot generate any more, as a signal would, after its callers could learn why."""
    await pool.died.wait()
    await asyncio.sleep(DEAD_GRACE_S)
    shutdown.request(DEAD_CODE)


async def _start(settings: ServerSettings) -> ServerState:
    load_model_identity(settings.model, dtype=settings.dtype)  # fails before engines are started
    reader = ImageReader(settings.image_roots, settings.limits, domains=settings.allowed_media_domains)
    size = vocabulary_size(settings.model)
    prompts = PromptMaker(settings.model, vocabulary_size=size, reader=reader, stop_token=settings.stop_token)
    replicas = await start_replicas(settings)
    settings = replace(settings, dtype=replicas[0].dtype)  # they may say auto or half
    model = load_model_identity(settings.model, dtype=settings.dtype)
    pool = EnginePool(replicas, weights_set=settings.load_format != "dummy")
    return assemble(settings, model=model, prompts=prompts, pool=pool)


async def start_replicas(settings: ServerSettings) -> list[VllmReplica]:
    """All engines side by side; the next one begins when the process of the one before is there.

    Each process takes its GPUs from the environment as it is then. Without GPUs processes are forked, which needs idle
    threads: there, the engines start one after the other.
    """
    number, starts = settings.data_parallel_size, list[asyncio.Task[VllmReplica]]()
    _say(f"starting {number} engine{'s' if number > 1 else ''} of {settings.model}; on GPUs this takes minutes")
    try:
        for index in range(number):
            before = len(active_children())
            starts.append(asyncio.create_task(_start_replica(settings, index)))
            while not starts[-1].done() and not (settings.gpus and len(active_children()) > before):
                await asyncio.sleep(_START_POLL_S)
        replicas = await asyncio.gather(*starts)
    except BaseException:
        kill_children()  # threads that start the other engines end with them
        raise
    await asyncio.gather(*(_warm_up(replica) for replica in replicas))
    return replicas


async def _start_replica(settings: ServerSettings, index: int) -> VllmReplica:
    began = time.monotonic()
    replica = await asyncio.to_thread(VllmReplica, settings, index=index)
    _say(f"engine {index + 1} of {settings.data_parallel_size} is up after {time.monotonic() - began:.0f} s")
    return replica


def _say(text: str) -> None:
    print(f"rollout server: {text}", file=sys.stderr, flush=True)


async def _warm_up(replica: VllmReplica) -> None:
    """One token: what vLLM sets up with its first request would keep health waiting for more than a second."""
    prompt = EnginePrompt(token_ids=[0], images=[], expanded_len=1)
    params = replica.params_of(GenerateRequest(sampling=Sampling(max_tokens=1)), seed=None)
    await replica.generate(prompt, params, "warm-up")


def vocabulary_size(directory: str) -> int:
    """Rows of the embedding, by the model's config."""
    config: dict[str, Any] = json.loads((Path(directory) / "config.json").read_text())
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
