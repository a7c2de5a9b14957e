"""What vLLM's worker gets from us: an expected error is returned, since an exception would lose its code on the way."""

import socket
import time
from types import SimpleNamespace

import pytest

from conformance.doubles.refusals import refused
from conformance.judge.ports import free_port
from rollmatch.weights.group_address import MIN_SECRET, GroupAddress, bind
from rollmatch.weights.plan import Spec
from rollmatch.weights.transfer_plan import MergePlan, TransferPlan, to_wire
from rollmatch.weights.worker.extension import WorkerExtension
from rollmatch.weights.worker.in_place import Served
from rollmatch.weights.worker.stock_engine import GlooEngine, StockInitInfo

PLAN = TransferPlan(tensors=(Spec("a", "uint8", (4,)),), buckets=(1,))
NEED_A_GROUP = {
    "rollmatch_receive": (to_wire(PLAN),),
    "rollmatch_receive_again": ("2", "1"),
    "rollmatch_poll": (0.0,),
    "rollmatch_load": ([],),
    "rollmatch_merge": (to_wire(MergePlan(merges=(), model=())),),
}


@pytest.mark.parametrize("method", NEED_A_GROUP)
def test_a_worker_without_a_group_returns_what_is_wrong(method):
    failure = getattr(WorkerExtension(), method)(*NEED_A_GROUP[method])["failure"]
    assert (failure["code"], failure["status"]) == ("communicator-missing", 409)


def test_a_worker_returns_that_its_port_is_taken():
    worker = WorkerExtension()
    worker.rank, worker.device = 0, None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = GroupAddress(
            host="127.0.0.1", port=taken.getsockname()[1], rank=0, world_size=2, timeout_s=5, join_timeout_s=5
        )
        failure = worker.rollmatch_open(to_wire(address), "gloo")["failure"]
    assert failure["code"] == "group-port-in-use"
    assert worker.rollmatch_receiver is None


def test_a_worker_tells_how_long_it_waits_in_a_group_that_was_left():
    worker = WorkerExtension()
    worker.rank, worker.device = 0, None
    worker.vllm_config = SimpleNamespace(quant_config=None)
    address = GroupAddress(
        host="127.0.0.1",
        port=free_port(),
        rank=0,
        world_size=2,
        secret="s" * MIN_SECRET,
        timeout_s=2,
        join_timeout_s=2,
    )
    assert worker.rollmatch_open(to_wire(address), "gloo") == {"rank": 0}
    assert [worker.rollmatch_close() for _ in range(2)] == [{"leaving": True}] * 2
    deadline = time.monotonic() + 20
    while worker.rollmatch_close()["leaving"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    bind("127.0.0.1", address.port).close()


def test_a_learner_that_names_no_way_of_sending_is_refused_by_a_stock_server():
    info = StockInitInfo(
        master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, secret="", timeout_s=5, join_timeout_s=5
    )
    with refused("protocol-unknown", "init_info.protocol", problem="by protocol 0, this server receives by protocol 1"):
        GlooEngine.init_transfer_engine(None, info)


def test_a_worker_without_a_group_has_nothing_to_drop_and_tells_whether_its_model_is_whole():
    worker = WorkerExtension()
    assert (worker.rollmatch_drop(), worker.rollmatch_close()) == ({}, {"leaving": False})
    assert worker.rollmatch_whole() == {"whole": True}
    worker.rollmatch_served = Served()
    assert worker.rollmatch_whole() == {"whole": True}
    worker.rollmatch_served.is_whole = False
    assert worker.rollmatch_whole() == {"whole": False}
