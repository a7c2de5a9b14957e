"""A stock ``vllm serve`` without an engine: real HTTP and a real gloo group."""

import time

from conformance.doubles.http_server import read_body, send
from conformance.doubles.native_double import address_in
from rollmatch.errors import RollmatchError
from rollmatch.weights.gloo import GlooGroup
from rollmatch.weights.plan import Spec
from rollmatch.weights.transfer_plan import TransferPlan
from rollmatch.weights.worker.receiver import Receiver

ROUTES = (
    *("health", "get_world_size", "weight_info", "v1/chat/completions", "v1/completions", "pause"),
    *(
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "resume",
        "shutdown_weight_transfer_engine",
    ),
    "reset_prefix_cache",
)


class StockDouble:
    """A stock ``vllm serve`` without an engine, over a real gloo group; ``faults``: route -> message of its 500."""

    def __init__(self):
        self.served, self.version, self.faults, self.calls = {}, "default", {}, []
        self.is_paused, self.joined, self.receiver = False, None, None
        self.backend = None
        """Of its weight transfer; None: it has no route that says so."""

    @property
    def routes(self):
        return ROUTES if self.backend is None else (*ROUTES, "server_info")

    def server_info(self, _, query):
        assert query == "config_format=json"
        return {"vllm_config": {"weight_transfer_config": {"backend": self.backend}}}

    def restart(self):
        self.served, self.version, self.receiver = {}, "default", None

    def answer(self, handler):
        path, _, query = handler.path.partition("?")
        name, body = path.strip("/"), read_body(handler)
        if name not in ("health", "openapi.json", "get_world_size", "weight_info"):
            self.calls.append("/" + name)
        try:
            send(handler, *self.reply(name, body, query))
        except RollmatchError as error:
            send(handler, 500, {"error": {"message": str(error)}})

    def reply(self, name, body, query):
        if name in self.faults:
            return 500, {"error": {"message": self.faults[name], "type": "InternalServerError", "code": 500}}
        if name == "openapi.json":
            return 200, {"paths": {f"/{known}": {} for known in self.routes}}
        if name not in self.routes:
            return 404, {"detail": "Not Found"}
        return 200, getattr(self, name.replace("/", "_"), lambda *_: {})(body, query)

    def get_world_size(self, *_):
        return {"world_size": 1}

    def weight_info(self, *_):
        return {"weight_version": self.version}

    def init_weight_transfer_engine(self, body, _):
        info = body["init_info"]
        self.joined = info
        address = address_in(info, info["master_address"], info["master_port"])
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
        info = body["update_info"]
        shapes = map(tuple, info["shapes"])
        specs = tuple(Spec(*fields) for fields in zip(info["names"], info["dtype_names"], shapes, strict=True))
        self.receiver.begin(TransferPlan(tensors=specs, buckets=tuple(info["buckets"]), digests_follow=True))
        self.settle()
        self.served = self.receiver.take()
        return {}

    def finish_weight_update(self, body, _):
        self.version = body["weight_version"]
        return {}

    def settle(self):
        while self.receiver.progress().is_busy:
            time.sleep(0.001)
