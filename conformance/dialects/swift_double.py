"""A server of the swift dialect without an engine: every response says what its prompt said."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rollmatch.dialects.prompt import Prompt, SamplingRules
from rollmatch.dialects.watch import WatchRules
from rollmatch.errors import RollmatchError

RULES = SamplingRules(
    max_tokens=8,
    temperature=0.0,
    top_p=1.0,
    top_k=-1,
    repetition_penalty=1.0,
    stop_token_ids=(9,),
    banned_token_ids=(7,),
)
QUICK = WatchRules(poll_s=0.1, look_timeout_s=0.3, max_failures=2, silence_s=0.8)
SWIFT_ROUTES = ("/health/", "/infer/", "/get_world_size/", "/init_communicator/", "/update_flattened_params/")


def prompts(num_prompts):
    return [
        Prompt(
            request_id=f"0.0.{i}",
            prompt_token_ids=(1, i),
            messages=({"role": "user", "content": f"{i}"},),
            images=(),
            seed=5 + i,
        )
        for i in range(num_prompts)
    ]


class SwiftDouble:
    """A server of the swift dialect; what is said comes back as ids. Behaviour is replaced by the tests."""

    def __init__(self):
        self.num_connections, self.bodies, self.calls = 0, [], []
        self.health_status, self.is_silent = 200, False
        self.infer = self.echo

    @property
    def asked(self):
        """Calls but for health, which the watch asks for whenever an answer takes long."""
        return [path for path in self.calls if path != "/health"]

    def echo(self, handler, said):
        entries = [
            {
                "response": {
                    "prompt_token_ids": [1, int(n)],
                    "choices": [{"token_ids": [int(n), 9], "finish_reason": "stop"}],
                }
            }
            for n in said
        ]
        self.send(handler, entries)

    def send(self, handler, body, status=200):
        raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(raw)))
        handler.end_headers()
        handler.wfile.write(raw)

    def answer(self, handler):
        path = handler.path.rstrip("/")
        raw = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        self.calls.append(path)
        if path == "/infer":
            self.bodies.append(json.loads(raw))
            self.infer(handler, [r["messages"][0]["content"] for r in self.bodies[-1]["infer_requests"]])
        elif path == "/health":
            while self.is_silent:
                time.sleep(0.05)
            self.send(handler, {"status": "ok"}, self.health_status)
        elif path == "/openapi.json":
            self.send(handler, {"paths": {route: {} for route in SWIFT_ROUTES}})
        else:
            handler.connection.close()


@contextmanager
def running_double():
    made = SwiftDouble()

    class SwiftAnswering(BaseHTTPRequestHandler):
        def setup(self):
            made.num_connections += 1
            super().setup()

        do_GET = do_POST = lambda self: made.answer(self)

        def log_message(self, *_):
            pass

    front = ThreadingHTTPServer(("127.0.0.1", 0), SwiftAnswering)
    front.daemon_threads = True
    front.handle_error = lambda *_: None
    thread = threading.Thread(target=front.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    made.url, made.front = f"http://127.0.0.1:{front.server_port}", front
    try:
        yield made
    finally:
        made.is_silent = False
        front.shutdown()
        front.server_close()


def error_of(call):
    with pytest.raises(RollmatchError) as caught:
        call()
    return caught.value
