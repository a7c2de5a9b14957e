"""A stock ``vllm serve`` without an engine: its routes without slash at their end, a real gloo group, no model.

``faults`` maps a route to the message of the 500 it is answered with.
"""

import json
import time
from http.server import BaseHTTPRequestHandler

from conformance.weights.fronts import running
from rollmatch.errors import RollmatchError
from rollmatch.weights.gloo import GlooGroup
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.plan import Spec, TransferPlan
from rollmatch.weights.worker.receiver import Receiver

ROUTES = (
    *("health", "get_world_size", "weight_info", "v1/chat/completions", "init_weight_transfer_engine", "pause"),
    *("start_weight_update", "update_weights", "finish_weight_update", "resume", "shutdown_weight_transfer_engine"),
    "reset_prefix_cache",
)


class StockDouble:
    def __init__(self):
        self.served, self.version, self.faults, self.calls = {}, "default", {}, []
        self.is_paused, self.joined, self.receiver = False, None, None

    def restart(self):
        self.served, self.version, self.receiver = {}, "default", None

    def answer(self, route, query, body):
        name = route.strip("/")
        if name not in ("health", "openapi.json", "get_world_size", "weight_info"):
            self.calls.append("/" + name)
        if name in self.faults:
            return 500, {"error": {"message": self.faults[name], "type": "InternalServerError", "code": 500}}
        if name == "openapi.json":
            return 200, {"paths": {f"/{known}": {} for known in ROUTES}}
        if name not in ROUTES:
            return 404, {"detail": "Not Found"}
        told = getattr(self, name.replace("/", "_"), lambda *_: {})(body, query)
        return 200, told

    def get_world_size(self, *_):
        return {"world_size": 1}

    def weight_info(self, *_):
        return {"weight_version": self.version}

    def init_weight_transfer_engine(self, body, _):
        told = body["init_info"]
        self.joined = told
        address = GroupAddress(
            host=told["master_address"],
            port=told["master_port"],
            rank=told["rank_offset"],
            world_size=told["world_size"],
            secret=told["secret"],
            timeout_s=told["timeout_s"],
            join_timeout_s=told["join_timeout_s"],
        )
        self.receiver = Receiver.joining(lambda: GlooGroup.open(address, source=0))
        self.settle()
        return {}

    def pause(self, _, query):
        assert query == "mode=wait&clear_cache=true"
        self.is_paused = True
        return {}

    def resume(self, *_):
        self.is_paused = False
        return {}

    def update_weights(self, body, _):
        told = body["update_info"]
        shapes = map(tuple, told["shapes"])
        specs = tuple(Spec(*fields) for fields in zip(told["names"], told["dtype_names"], shapes, strict=True))
        self.receiver.begin(TransferPlan(tensors=specs, buckets=tuple(told["buckets"]), digests_follow=True))
        self.settle()
        self.served = self.receiver.take()
        return {}

    def finish_weight_update(self, body, _):
        self.version = body["weight_version"]
        return {}

    def settle(self):
        while self.receiver.progress().is_busy:
            time.sleep(0.001)


def serving(*doubles):
    """URLs of running doubles."""
    return running(*map(_answering_for, doubles))


def _answering_for(double):
    class Answering(BaseHTTPRequestHandler):
        def respond(self):
            route, _, query = self.path.partition("?")
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                status, told = double.answer(route, query, json.loads(raw) if raw else None)
            except RollmatchError as error:
                status, told = 500, {"error": {"message": str(error)}}
            answer = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = respond

        def log_message(self, *_):
            pass

    return Answering
