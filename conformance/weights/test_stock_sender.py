"""Stock vLLM servers are paused, updated and resumed, whatever becomes of the update."""

import json
import time
from http.server import BaseHTTPRequestHandler

import pytest
import torch

from conformance.scenarios.configs import not_refused
from conformance.server.instance import free_port
from conformance.weights.native_double import running
from rollmatch.dialects.native.group import Rendezvous
from rollmatch.dialects.vllm.sender import StockSender
from rollmatch.errors import RollmatchError
from rollmatch.rollout.weight_sender import make_sender
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
    """A stock ``vllm serve`` without an engine, over a real gloo group; ``faults``: route -> message of its 500."""

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


UPDATE = ["/pause", "/start_weight_update", "/update_weights"]
GOOD = [*UPDATE, "/finish_weight_update", "/reset_prefix_cache", "/resume"]


def tensors_of(value):
    return {"a": torch.full((3, 2), float(value)), "b": torch.full((4,), float(value), dtype=torch.bfloat16)}


def equal(held, sent):
    return held.keys() == sent.keys() and all(torch.equal(held[name], sent[name]) for name in sent)


@pytest.fixture
def start(open_sender):
    """Doubles -> a sender to them; ends both."""

    def begin(*doubles):
        rendezvous = Rendezvous(host="127.0.0.1", port=free_port(), client="me", timeout_s=3, join_timeout_s=5)
        return open_sender(serving(*doubles), lambda servers: make_sender(servers, [0] * len(servers), rendezvous))

    return begin


@pytest.mark.scenario(clauses=["server-dialects/the-vllm-dialect-drives-a-stock-vllm-server#1"])
@pytest.mark.parametrize("num_servers", [1, 3])
def test_every_server_is_paused_updated_and_resumed(start, num_servers):
    doubles = [StockDouble() for _ in range(num_servers)]
    sender = start(*doubles)
    assert isinstance(sender, StockSender)
    for version in (1, 2):
        for double in doubles:
            double.calls.clear()
        sender.send(tensors_of(version).items(), version=version)
        for double in doubles:
            assert [call for call in double.calls if call != "/init_weight_transfer_engine"] == GOOD
            assert equal(double.served, tensors_of(version))
            assert not double.is_paused
            assert double.version == f"rollmatch-{version}"


@pytest.mark.scenario(clauses=["server-dialects/the-vllm-dialect-drives-a-stock-vllm-server#2"])
def test_the_trainer_is_rank_0_of_one_group(start):
    doubles = [StockDouble() for _ in range(2)]
    with not_refused():
        start(*doubles).send(tensors_of(1).items(), version=1)
    assert [double.joined["rank_offset"] for double in doubles] == [1, 2]
    assert [double.joined["world_size"] for double in doubles] == [3, 3]


@pytest.mark.scenario(
    "server-dialects/a-failed-update-resumes-generation",
    clauses=["server-dialects/the-vllm-dialect-drives-a-stock-vllm-server#1,3"],
)
def test_a_failed_update_resumes_generation(start):
    double = StockDouble()
    sender = start(double)
    double.faults = {"update_weights": "out of memory on rank 0"}
    with pytest.raises(RollmatchError) as caught:
        sender.send(tensors_of(1).items(), version=1)
    assert caught.value.code == "server-refused"
    assert "out of memory on rank 0" in caught.value.problem
    assert [call for call in double.calls if call != "/init_weight_transfer_engine"] == [*UPDATE, "/resume"]
    double.faults = {}
    sender.send(tensors_of(2).items(), version=2)
    assert equal(double.served, tensors_of(2))


@pytest.mark.scenario(clauses=["server-dialects/the-vllm-dialect-drives-a-stock-vllm-server#3"])
@pytest.mark.parametrize("route", ["pause", "start_weight_update", "finish_weight_update", "resume"])
def test_no_call_follows_one_that_failed_but_the_last(start, route):
    double = StockDouble()
    sender = start(double)
    double.faults = {route: "no"}
    with pytest.raises(RollmatchError) as caught:
        sender.send(tensors_of(1).items(), version=1)
    assert caught.value.code == "server-refused"
    place = GOOD.index(f"/{route}")
    expected = GOOD if route == "resume" else [*GOOD[: place + 1], "/resume"]
    assert [call for call in double.calls if call != "/init_weight_transfer_engine"] == expected


def test_a_server_that_was_started_again_is_met_anew(start):
    doubles = [StockDouble() for _ in range(2)]
    sender = start(*doubles)
    sender.send(tensors_of(1).items(), version=1)
    doubles[1].restart()
    sender.send(tensors_of(2).items(), version=2)
    assert all(equal(double.served, tensors_of(2)) for double in doubles)


def test_an_adapter_is_not_sent_alone(start):
    sender = start(StockDouble())
    with pytest.raises(RollmatchError) as caught:
        sender.send_adapter(None, version=1)
    assert caught.value.code == "adapter-unproven"
    sender.send(tensors_of(1).items(), version=1)
