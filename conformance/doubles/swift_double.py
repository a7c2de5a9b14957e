"""A server of the swift dialect without an engine: every response says what its prompt said."""

import time
from contextlib import contextmanager

from conformance.doubles.http_server import http_server, read_body, send
from rollmatch.dialects.prompt import Prompt, SamplingRules
from rollmatch.dialects.watch import WatchRules

RULES = SamplingRules(
    max_tokens=8,
    temperature=0.0,
    top_p=1.0,
    top_k=-1,
    repetition_penalty=1.0,
    stop_token_ids=(9,),
    banned_token_ids=(7,),
    logprobs=False,
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
        self.infer, self.progress, self.idle_s, self.call_ids = self.echo, lambda: None, dict, []

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
        send(handler, status, body)

    def answer(self, handler):
        path, body = handler.path.rstrip("/"), read_body(handler)
        self.num_connections += 1
        self.calls.append(path)
        if path == "/infer":
            self.call_ids.append(handler.headers.get("x-call-id"))
            self.bodies.append(body)
            self.infer(handler, [r["messages"][0]["content"] for r in body["infer_requests"]])
        elif path == "/health":
            while self.is_silent:
                time.sleep(0.05)
            send(handler, self.health_status, {"status": "ok", "progress": self.progress(), "calls": self.idle_s()})
        elif path == "/openapi.json":
            send(handler, 200, {"paths": {route: {} for route in SWIFT_ROUTES}})
        else:
            handler.connection.close()


@contextmanager
def running_double():
    made = SwiftDouble()
    with http_server(lambda handler: made.answer(handler)) as front:
        made.url, made.front = front.url, front
        yield made
        made.is_silent = False
