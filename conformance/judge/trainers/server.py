"""A rollout server that records what a trainer does to it, answers correctly, and goes wrong once if it is asked to.

Its engine and routes are those of the small correct server that judges the judge
(``conformance.judge.servers.broken``).
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from conformance.judge.servers.broken.app import GENERATING, BrokenServer, listening, make_app
from conformance.judge.servers.broken.engine import TinyEngine
from conformance.judge.servers.broken.updates import TransferGroup, Updates
from conformance.judge.servers.dialects import DIALECTS
from conformance.judge.servers.exchange import RecordedCall
from conformance.judge.trainers.arrivals import Arrivals, read_generate, without_last
from conformance.judge.trainers.native_group import NativeGroup
from conformance.judge.trainers.packed import listed, packed
from conformance.judge.trainers.plugged_group import PluggedGroup
from conformance.judge.trainers.updates import RecordedUpdates
from rollmatch.dialects.http import MSGPACK

LATE, SHORT, BUSY, UNAVAILABLE, RESTART = "late", "short", "429", "503", "restart"
DISTURBED_ROUND = 2
"""The fault hits the first call for rollouts after so many updates."""
NATIVE, INFER, AGAIN = "native", "native/infer", "native/sync/again"
OPENING = ("init_communicator", "init_weight_transfer_engine", "native/communicator")
CLOSING = ("close_communicator", "shutdown_weight_transfer_engine", "native/communicator/close")
STARTING = ("update_flattened_params", "update_named_param", "start_weight_update", "native/sync", AGAIN)
FURTHER = {
    NATIVE: AGAIN,
    "swift": "process_weights_after_loading reset_encoder_cache reset_mm_cache get_model_state_keys update_named_param",
    "trl": "",
    "vllm": "shutdown_weight_transfer_engine weight_info version server_info v1/models",
}
"""Routes that trainers may call beside those that servers are judged by."""
CONFIG = {"weight_transfer_config": {"backend": "gloo"}, "model_config": {"logprobs_mode": "raw_logprobs"}}
"""What TRL reads of a stock server's."""
Receive, Send = Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]


class RecordingServer(BrokenServer):
    """One dialect's routes; ``fault`` is one of the words above, or empty."""

    def __init__(self, engine: TinyEngine, dialect: str, *, dtype: str, fault: str = "", late_s: float = 8.0) -> None:
        self.arrivals, self.dtype, self.fault, self.late_s = Arrivals(), dtype, fault, late_s
        self.dialect = dialect
        self.routes_served = {path.strip("/") for path in DIALECTS[dialect].routes} | {"openapi.json"}
        self.routes_served |= set(FURTHER[dialect].split())
        self.is_disturbed = self.is_paused = self.is_down = self.is_holding = False
        super().__init__(engine)
        self.posts["reset_mm_cache"] = lambda _: {"success": True}
        self.posts |= {"pause": lambda _, **query: self._pause(True), "resume": lambda _: self._pause(False)}
        self.gets["server_info"] = lambda: {"vllm_config": CONFIG}
        self.gets["v1/models"] = lambda: {"data": [{"id": "policy", "parent": None}]}
        self.gets["get_model_state_keys"] = lambda: {"keys": sorted(self.engine.weights)}
        self.gets["native/identity"] = lambda: self.native.identity()
        self.posts |= {
            "native/communicator": lambda body: self.native.join(body),
            "native/communicator/close": lambda body: self.native.close(body),
            "native/sync": lambda body: self.native.sync(body),
            AGAIN: lambda body: self.native.sync_again(body),
            "native/sync/commit": lambda body: self.native.commit(body),
            "native/sync/drop": lambda body: self.native.drop(body),
        }

    def make_updates(self) -> Updates:
        updates = RecordedUpdates(self.engine, self.arrivals, self.dtype)
        self.native = NativeGroup(updates, f"recording-{self.generation}")
        return updates

    def make_transfer(self) -> TransferGroup:
        return PluggedGroup(self.updates)

    def init(self, body: Any) -> None:
        """The trainer runs on this machine, also where it names every interface, as TRL does."""
        super().init(body | {"host": "127.0.0.1"})

    def routes(self) -> Any:
        further = {f"/{path}" for path in FURTHER[self.dialect].split() if path in (*CLOSING, AGAIN, "weight_info")}
        return {"paths": {path: {} for path in sorted(DIALECTS[self.dialect].routes | further)}}

    def restart(self) -> None:
        if self.generation:
            self.native.leave()
        super().restart()
        self.engine.forget()

    def health(self) -> Any:
        return super().health() | ({"instance": self.native.instance} if self.dialect == NATIVE else {})

    def generate(self, path: str, body: Any, is_left: Callable[[], bool]) -> Any:
        """In the native dialect a request may have sampling of its own, and a response has its version."""
        if path != INFER:
            return super().generate(path, body, is_left)
        version, responses = self.updates.version, []
        for one in body["requests"]:
            alone = body | {"requests": [one], "sampling": one.get("sampling") or body.get("sampling")}
            responses += super().generate(path, alone, is_left)["responses"]
        named = [{"policy_version": version} | one for one in responses]
        return {"instance": self.native.instance, "policy_version": version, "responses": named}

    def _pause(self, is_paused: bool) -> None:
        self.is_paused = is_paused

    def arrive(self, path: str, body: Any) -> dict[str, Any] | None:
        """Note what a call means; the event of a call for rollouts."""
        updates = self.updates
        assert isinstance(updates, RecordedUpdates)
        if path in STARTING and self.calls.num_running and not self.is_paused:
            self.arrivals.note("overlap", what=f"/{path} during {self.calls.num_running} running calls for rollouts")
        if path in GENERATING:
            if updates.is_open:
                self.arrivals.note("overlap", what=f"/{path} after {len(updates.announced)} tensors of an update")
            call = read_generate(path, body)
            return self.arrivals.note("generate", prompts=call.prompts, seeds=call.seeds)
        return None

    def settle(self, path: str, body: Any, status: int) -> None:
        """Note what a call has changed."""
        if path in OPENING:
            info = body.get("init_info", body)
            self.arrivals.note("open", world_size=info.get("world_size"), status=status)
        elif path in CLOSING:
            self.arrivals.note("close")

    def next_fault(self, event: dict[str, Any]) -> str:
        """The fault that hits this call for rollouts; empty for most."""
        if not self.fault or self.is_disturbed or self.arrivals.count("update") < DISTURBED_ROUND:
            return ""
        self.is_disturbed = True
        event["fault"] = self.fault
        return self.fault


class RecordingApp:
    """ASGI: records calls around the routes of ``server``, and disturbs one."""

    def __init__(self, server: RecordingServer, *, down_s: float) -> None:
        self.server, self.inner, self.down_s = server, make_app(server), down_s
        self.abort: Callable[[], None] = lambda: None
        """Break off every connection."""

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.inner(scope, receive, send)
        elif self.server.is_down:
            self.abort()
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Any, receive: Receive, send: Send) -> None:
        server, path, began = self.server, scope["path"].strip("/"), time.monotonic()
        raw, is_packed = await _whole(receive), dict(scope["headers"]).get(b"content-type") == MSGPACK.encode()
        sent = _decoded(raw, is_packed=is_packed)
        call = RecordedCall(label=path, method=scope["method"], path=scope["path"], sent=sent)
        server.arrivals.calls.append(call)
        if path not in server.routes_served:
            call.status, call.reply = 404, {"problem": f"the {server.dialect} dialect has no route /{path}"}
        else:
            await self._answer(call, path, scope, raw, receive)
        call.seconds = round(time.monotonic() - began, 3)
        if call.failure:
            self.abort()
            return
        await _reply(send, call.status or 500, call.reply, is_packed=is_packed)

    async def _answer(self, call: RecordedCall, path: str, scope: Any, raw: bytes, receive: Receive) -> None:
        server = self.server
        try:
            if path == INFER:
                call.sent = listed(call.sent)
            raw = json.dumps(call.sent).encode() if server.dialect == NATIVE else raw
            event = server.arrive(path, call.sent)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            call.status, call.reply = 400, {"problem": f"{type(error).__name__}: {error}"}
            return
        fault = server.next_fault(event) if event else ""
        if fault in (BUSY, UNAVAILABLE):
            call.status, call.reply = int(fault), {"problem": "busy; ask again"}
        elif fault == RESTART:
            await self._restart(call)
        else:
            if fault == LATE:
                server.is_holding = True
                await asyncio.sleep(server.late_s)
                server.is_holding = False
            call.status, call.reply = await _inner(self.inner, scope, raw, receive)
            if fault == SHORT:
                call.reply = without_last(path, call.reply)
            server.settle(path, call.sent, call.status)

    async def _restart(self, call: RecordedCall) -> None:
        """The process dies, and another one listens after ``down_s``."""
        server, loop = self.server, asyncio.get_running_loop()
        server.is_down, call.failure = True, "the server was restarted"
        await loop.run_in_executor(server.pool, server.restart)
        server.arrivals.note("restart")
        loop.call_later(self.down_s, setattr, server, "is_down", False)


async def _whole(receive: Receive) -> bytes:
    parts, is_more = [], True
    while is_more:
        message = await receive()
        parts.append(message.get("body", b""))
        is_more = message.get("more_body", False)
    return b"".join(parts)


async def _inner(app: Any, scope: Any, raw: bytes, receive: Receive) -> tuple[int, Any]:
    """Status and body of the route's own reply."""
    messages: list[Any] = []
    is_read = False

    async def read() -> Any:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": raw, "more_body": False}

    async def keep(message: Any) -> None:
        messages.append(message)

    await app(scope, read, keep)
    body = b"".join(message.get("body", b"") for message in messages[1:])
    return messages[0]["status"], _decoded(body)


async def _reply(send: Send, status: int, body: Any, *, is_packed: bool) -> None:
    raw, kind = (packed(body), MSGPACK) if is_packed else (json.dumps(body).encode(), "application/json")
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(raw)).encode())]
    if status in (int(BUSY), int(UNAVAILABLE)):
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})


def _decoded(raw: bytes, *, is_packed: bool = False) -> Any:
    try:
        return msgspec.msgpack.decode(raw) if is_packed else json.loads(raw or b"{}")
    except ValueError:
        return raw.decode("utf-8", "replace")


@contextmanager
def recording(server: RecordingServer, *, down_s: float) -> Iterator[RecordingServer]:
    """Yield it with its ``url``, served from a thread."""
    app = RecordingApp(server, down_s=down_s)
    with listening(app) as (server.url, running):
        app.abort = lambda: [each.transport.abort() for each in tuple(running.server_state.connections)]
        try:
            yield server
        finally:
            server.restart()
