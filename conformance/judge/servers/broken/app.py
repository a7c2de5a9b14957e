"""HTTP: all routes of all dialects, in one process."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from conformance.judge.servers.broken.adapters import Adapters
from conformance.judge.servers.broken.calls import LONG, Calls, wait_while
from conformance.judge.servers.broken.engine import TinyEngine, TinyResponse, Unserved
from conformance.judge.servers.broken.speech import read_call, reply, stream_of
from conformance.judge.servers.broken.updates import QueuedGroup, RejectedUpdate, TransferGroup, Updates
from conformance.judge.servers.dialects import DIALECTS
from conformance.judge.servers.sglang import CACHE, GROUP

GENERATING = ("infer", "generate", "native/infer", "v1/completions", "v1/chat/completions", "inference/v1/generate")
KNOWN_FIELDS = {
    *("infer_requests", "request_config", "prompts", "images", "generation_kwargs", "requests", "sampling", "prompt"),
    *("model", "messages", "stop", "seed", "n", "logprobs", "return_token_ids", "request_id"),
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "stream", "logit_bias", "token_ids", "sampling_params"),
    *("input_ids", "return_logprob", "return_prompt_token_ids", "image_data", "repetition_penalty"),
}
SGLANG_PAUSES = {"in_place": "keep", "retract": "wait", "abort": "abort"}
WATCH_S = 0.05


class BrokenServer:
    """State, which ``restart`` resets, and one method per route."""

    def __init__(self, engine: TinyEngine) -> None:
        self.engine, self.broken = engine, engine.broken
        self.pool = ThreadPoolExecutor(48)
        self.posts: dict[str, Callable[[Any], Any]] = {
            "init_communicator": self.init,
            "native/communicator": self.init_native,
            "close_communicator": lambda _: self.queued.close(),
            "update_flattened_params": self.update_flat,
            "update_named_param": self.update_named,
            "update_adapter_flattened_param": self.refuse,
            "process_weights_after_loading": self.end,
            "reset_prefix_cache": self.end,
            "reset_encoder_cache": lambda _: {"success": True},
            "get_engine_type": lambda _: {"engine_type": "transformers"},
            "init_weight_transfer_engine": self.init_transfer,
            "start_weight_update": lambda _: self.transfer.start(),
            "update_weights": self.update_transfer,
            "finish_weight_update": lambda _: self.transfer.finish(),
            "shutdown_weight_transfer_engine": lambda _: self.transfer.shutdown(),
            "init_weights_update_group": lambda body: self.named.init(body),
            "destroy_weights_update_group": lambda _: self.named.shutdown(),
            "begin_weight_update": lambda _: self.named.start(),
            "update_weights_from_distributed": lambda body: self.named.update(body),
            "end_weight_update": lambda _: self.named.finish(),
            "update_weight_version": lambda body: {"new_version": body["new_version"]},
            "pause_generation": lambda body: self.pause(body, SGLANG_PAUSES[body["mode"]]),
            "continue_generation": self.resume,
            "pause": self.pause,
            "resume": self.resume,
            "tokenize": self.tokenize,
            "sleep": self.sleep,
            "release_memory_occupation": lambda body: self.sleep(body, "1" if body.get("tags") else "2"),
            "resume_memory_occupation": lambda body: self.wake(body, "" if body["tags"] == CACHE else body["tags"][0]),
            "v1/load_lora_adapter": lambda body: self.adapters.load(body),
            "v1/unload_lora_adapter": lambda body: self.adapters.unload(body["lora_name"]),
            "wake_up": self.wake,
            "native/sync": self.refuse,
            "native/communicator/close": self.refuse,
            "native/sync/commit": self.refuse,
            "native/sync/drop": self.refuse,
        }
        self.gets: dict[str, Callable[[], Any]] = {
            "health": self.health,
            "get_world_size": self.world_size,
            "openapi.json": self.routes,
            "version": lambda: {} if self.broken("no version is returned") else {"version": "1"},
            "native/identity": dict,
            "server_info": lambda: {"tp_size": 1},
            "model_info": lambda: {"weight_version": str(self.updates.version)},
            "weight_info": lambda: {"weight_version": str(self.updates.version)},
        }
        self.generation, self.url, self.key = 0, "", ""
        self.restart()

    def restart(self) -> None:
        """As at the start; calls that run are ended."""
        if self.generation:
            self.queued.close()
            self.transfer.shutdown()
            self.named.shutdown()
        self.generation += 1
        self.engine.reset()
        self.adapters = Adapters(self.engine)
        self.calls, self.updates = Calls(self.engine), self.make_updates()
        self.pauses = self.calls.pauses
        self.calls.version = lambda updates=self.updates: updates.version
        self.queued, self.transfer = QueuedGroup(self.updates), self.make_transfer()
        self.named = TransferGroup(self.updates, f"{GROUP}/{GROUP}//cpu/")
        self.calls.is_learned = lambda: any(group.is_open for group in (self.queued, self.transfer, self.named))

    def make_updates(self) -> Updates:
        """As at the start."""
        return Updates(self.engine)

    def make_transfer(self) -> TransferGroup:
        """For the vllm dialect."""
        return TransferGroup(self.updates)

    def health(self) -> Any:
        if self.calls.num_running and self.broken("health waits for generation"):
            began = time.monotonic()
            wait_while(lambda: self.calls.num_running)
            time.sleep(1.2 + time.monotonic() - began)  # longer than the check bears, however short the generation is
        version = (
            {} if self.broken("no version of the weights is returned") else {"policy_version": self.updates.version}
        )
        return {"status": "ok"} | version

    def world_size(self) -> Any:
        size: Any = "1" if self.broken("the world size is a text") else 1
        return {} if self.broken("the world size is not returned") else {"world_size": size}

    def routes(self) -> Any:
        listed = {path for kind in DIALECTS.values() for path in kind.routes}
        if self.broken("a route is not listed"):
            listed = {path for path in listed if "reset_prefix_cache" not in path}
        return {"paths": {path: {} for path in listed}}

    def init(self, body: Any) -> None:
        self.queued.init(body["host"], body["port"], body["world_size"])

    def init_native(self, body: Any) -> None:
        raise RejectedUpdate(f"this server joins no native group at {body['host']}")

    def refuse(self, _: Any) -> None:
        raise RejectedUpdate("not served")

    def update_flat(self, body: Any) -> None:
        entries = body["metadatas"]
        names, shapes = [one["name"] for one in entries], [one["shape"] for one in entries]
        tensors = self.updates.check(names, shapes, [one["dtype"].removeprefix("torch.") for one in entries])
        flat = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
        self.queued.announce(names, tensors, flat)

    def update_named(self, body: Any) -> None:
        dtype = body["dtype"].removeprefix("torch.")
        self.queued.announce([body["name"]], self.updates.check([body["name"]], [body["shape"]], [dtype]), None)

    def end(self, _: Any) -> Any:
        is_bare = not self.queued.finish() and not self.updates.version
        return {"message": "ok"} if is_bare and self.broken("a reset returns no success") else {"success": True}

    def init_transfer(self, body: Any) -> None:
        self.transfer.init(body["init_info"])

    def tokenize(self, body: Any) -> Any:
        ids = list(self.engine.encode(body["messages"]))
        return {"tokens": ids[:-2] if self.broken("tokenization leaves out the end of the template") else ids}

    def pause(self, _: Any, mode: str = "abort", clear_cache: str = "true") -> None:
        """Calls continue, and none is given up; there is no cache."""
        self.transfer.is_paused = self.named.is_paused = True
        self.pauses.append(mode)

    def resume(self, _: Any) -> None:
        self.transfer.is_paused = self.named.is_paused = False

    def sleep(self, _: Any, level: str = "1") -> None:
        if level == "2" and self.broken("after a deep sleep, an update is lost"):
            self.engine.load({name: torch.zeros_like(tensor) for name, tensor in self.engine.weights.items()})
            self.updates.skip()

    def wake(self, _: Any, tags: str = "") -> None:
        is_lost = tags == "kv_cache" and self.broken("waking by tags forgets the weights")
        if is_lost or (not tags and self.broken("waking at once forgets the weights")):
            self.engine.load({name: torch.zeros_like(tensor) for name, tensor in self.engine.weights.items()})

    def update_transfer(self, body: Any) -> None:
        self.transfer.update(body["update_info"])

    def generate(self, path: str, body: Any, is_left: Callable[[], bool]) -> Any:
        """Errors: ``Unserved``."""
        began = self.generation
        path = "sglang" if "input_ids" in body else path
        if self.queued.is_waiting and self.broken("generation waits for a learner"):
            wait_while(lambda: self.queued.is_waiting and began == self.generation, 2.0)
            raise RuntimeError("no learner came")
        prompts, sampling, seeds = read_call(path, body, self.engine)
        if not prompts and self.broken("a call without prompts is a failure"):
            raise RuntimeError("no prompts")
        if not prompts and self.broken("a call without prompts gets a response"):
            prompts, seeds = [self.engine.any_prompt()], [None]
        self.queued.settle()
        self.updates.before_generating()
        left = lambda: is_left() or began != self.generation  # noqa: E731
        num_pauses, version = len(self.pauses), self.updates.version
        with self.adapters.named(str(body.get("model", ""))):
            groups = self.calls.run(prompts, sampling, seeds, left)
        self._spoil_paused([one for group in groups for one in group], self.pauses[num_pauses:])
        whole = reply(path, groups, sampling, self.engine)
        if path == "inference/v1/generate":
            self._name_versions(whole, version)
        if not body.get("stream"):
            return whole
        stream = stream_of(whole, self.engine)
        is_cut = version != self.updates.version and self.broken("an update cuts streams")
        return stream[: len(stream) // 2].rpartition("data:")[0] if is_cut else stream

    def _name_versions(self, whole: Any, version: int) -> None:
        """A response is written by the weights that it began with."""
        if version != self.updates.version and self.broken("a response names the weights that came later"):
            version = self.updates.version + 1
        for choice in whole["choices"]:
            end = len(choice["token_ids"]) - self.broken("the last id has no version")
            choice["weight_versions"] = [{"version": str(version), "start": 0, "end": end}]

    def _spoil_paused(self, responses: list[TinyResponse], modes: list[str]) -> None:
        """Of responses that were written during pauses of these modes, or are long and began late, after the last."""
        for one in responses:
            last = (modes or self.pauses if len(one.ids) > LONG else modes)[-1:]
            is_cut = "keep" in last and self.broken("a pause to keep cuts what runs")
            if is_cut or ("wait" in last and self.broken("a pause to wait cuts what runs")):
                del one.ids[8:], one.logprobs[8:]
        if "abort" in self.pauses and not modes and self.broken("after an abort, prompts are answered otherwise"):
            for one in responses:
                one.ids[-1] = (one.ids[-1] + 1) % self.engine.num_ids


async def _front(request: Request) -> Any:
    server: BrokenServer = request.app.state.server
    path, broken = request.url.path.strip("/"), server.broken
    if path == "health" and not request.url.path.endswith("/") and broken("health has one form only"):
        return JSONResponse({}, 404)
    if server.key and path in (*server.posts, *GENERATING) and (status := _refusal(server, request, path)):
        return JSONResponse({"problem": "the key is not this server's"}, status)
    if request.method == "GET":
        if path in server.gets:
            return await _in_thread(server, server.gets[path])
        is_known = path in server.posts or path in GENERATING
        is_taken = is_known and broken("a wrong method is served")
        return JSONResponse({}, 200 if is_taken else 405 if is_known else 404)
    if path not in server.posts and path not in GENERATING:
        return JSONResponse({"problem": f"no route {path}"}, 404)
    try:
        body = json.loads(await request.body() or b"{}")
    except ValueError as error:
        if broken("invalid JSON is a failure"):
            raise
        return JSONResponse({"problem": str(error)}, 400)
    return await (_generate if path in GENERATING else _control)(server, path, body, request)


def _refusal(server: BrokenServer, request: Request, path: str) -> int:
    """Status for a call without the key; 0 where it has it."""
    broken, given = server.broken, request.headers.get("authorization", "").removeprefix("Bearer ")
    if path in GENERATING:
        is_cut = not request.url.path.endswith("/")
        is_right = given == server.key or (given and broken("any key will do"))
        is_open = is_right or (is_cut and broken("a path without its slash needs no key"))
        return 0 if is_open or broken("prompts need no key") else 401
    is_right = given == server.key and not (path.endswith("adapter_flattened_param") and broken("adapters take no key"))
    return 0 if is_right or broken("control calls need no key") else 401


async def _in_thread(server: BrokenServer, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    loop = asyncio.get_running_loop()
    value = await loop.run_in_executor(server.pool, partial(work, *arguments, **options))
    return PlainTextResponse(value) if isinstance(value, str) else JSONResponse(value)


async def _control(server: BrokenServer, path: str, body: Any, request: Request) -> Any:
    try:
        return await _in_thread(server, server.posts[path], body, **request.query_params)
    except KeyError as error:
        if server.broken("a missing field is a failure"):
            raise
        return JSONResponse({"problem": "?" if server.broken("a missing field is not named") else f"no {error}"}, 422)
    except RejectedUpdate as error:
        return JSONResponse({"problem": str(error)}, 409)


async def _generate(server: BrokenServer, path: str, body: Any, request: Request) -> Any:
    broken, is_gone = server.broken, threading.Event()
    if server.updates.is_stuck:
        return JSONResponse({"problem": "the engine is dead"}, 500)
    if not body.keys() <= KNOWN_FIELDS and broken("an unknown field is a failure"):
        raise RuntimeError("unknown field")
    watch = asyncio.create_task(_watch(request, is_gone))
    try:
        return await _in_thread(server, server.generate, path, body, is_gone.is_set)
    except (Unserved, KeyError) as error:
        return _refused(server, str(error))
    finally:
        watch.cancel()


def _refused(server: BrokenServer, problem: str) -> Any:
    broken, is_sampling, is_long = server.broken, "max_tokens" in problem, "too long" in problem
    if is_sampling and broken("a bad sampling value is a failure"):
        return JSONResponse({}, 500)
    if is_long and broken("a too long prompt ends the service"):
        server.updates.is_stuck = True
    if not is_sampling and not is_long and broken("a bad prompt is a failure"):
        return JSONResponse({}, 500)
    if not is_sampling and not is_long and broken("a bad prompt ends the service"):
        server.updates.is_stuck = True
    headers = {"Connection": "close"} if is_sampling and broken("an error closes the connection") else None
    return JSONResponse({"problem": problem}, 400, headers=headers)


async def _watch(request: Request, is_gone: threading.Event) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(WATCH_S)
    is_gone.set()


def make_app(server: BrokenServer) -> Starlette:
    """All routes of ``server``."""
    app = Starlette(routes=[Route("/{path:path}", _front, methods=["GET", "POST"])])
    app.state.server = server
    return app


@contextmanager
def listening(app: Any) -> Iterator[tuple[str, uvicorn.Server]]:
    """Yield the URL of an application that is served from a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_while(lambda: not running.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", running
    finally:
        running.should_exit = True
        thread.join(timeout=10)


@contextmanager
def serving(engine: TinyEngine) -> Iterator[BrokenServer]:
    """Yield it with its ``url``, served from a thread."""
    server = BrokenServer(engine)
    with listening(make_app(server)) as (server.url, _):
        try:
            yield server
        finally:
            server.restart()
