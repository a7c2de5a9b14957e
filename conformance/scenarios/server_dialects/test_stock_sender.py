"""Stock vLLM servers are paused, updated and resumed, whatever becomes of the update."""

import threading

import pytest
import torch

from conformance.doubles.refusals import refused
from conformance.doubles.stock_server import StockDouble
from rollmatch.dialects.vllm.sender import StockSender
from rollmatch.dialects.vllm.transports import PACKED, GlooTransport, NcclTransport
from rollmatch.errors import LaunchError
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.plan import Plan

UPDATE = ["/pause", "/start_weight_update", "/update_weights"]
GOOD = [*UPDATE, "/finish_weight_update", "/reset_prefix_cache", "/resume"]


def tensors_of(value):
    return {"a": torch.full((3, 2), float(value)), "b": torch.full((4,), float(value), dtype=torch.bfloat16)}


def equal(held, sent):
    return held.keys() == sent.keys() and all(torch.equal(held[name], sent[name]) for name in sent)


@pytest.mark.scenario(clauses=["server-dialects/the-vllm-dialect-drives-a-stock-vllm-server#1"])
@pytest.mark.parametrize("num_servers", [1, 3])
def test_every_server_is_paused_updated_and_resumed(start_sender, num_servers):
    doubles = [StockDouble() for _ in range(num_servers)]
    sender = start_sender(*doubles)
    assert isinstance(sender, StockSender)
    assert sender.check(()) is False, "these servers do not list their tensors"
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
def test_the_trainer_is_rank_0_of_one_group(start_sender):
    doubles = [StockDouble() for _ in range(2)]
    start_sender(*doubles).send(tensors_of(1).items(), version=1)
    assert [double.joined["rank_offset"] for double in doubles] == [1, 2]
    assert [double.joined["world_size"] for double in doubles] == [3, 3]


class Sized(StockDouble):
    """A server of several workers, which waits until all servers know their ranks, and opens no group."""

    def __init__(self, size, all_know):
        super().__init__()
        self.size, self.all_know = size, all_know

    def get_world_size(self, *_):
        return {"world_size": self.size}

    def init_weight_transfer_engine(self, body, _):
        self.joined = body["init_info"]
        self.all_know.wait()
        raise LaunchError("opens no group", code="no-group", key="size", remedy="None.")


@pytest.mark.scenario(clauses=["server-dialects/the-vllm-dialect-drives-a-stock-vllm-server#2"])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 4, 2)])
def test_workers_of_unequal_servers_have_ranks_of_their_own(start_sender, sizes):
    all_know = threading.Barrier(len(sizes), timeout=20)
    doubles = [Sized(size, all_know) for size in sizes]
    with refused("server-refused"):
        start_sender(*doubles).send(tensors_of(1).items(), version=1)
    ranks = [double.joined["rank_offset"] + worker for double in doubles for worker in range(double.size)]
    assert ranks == list(range(1, 1 + sum(sizes)))
    assert {double.joined["world_size"] for double in doubles} == {1 + sum(sizes)}


@pytest.mark.scenario(
    "server-dialects/a-failed-update-resumes-generation",
    clauses=["server-dialects/the-vllm-dialect-drives-a-stock-vllm-server#1,3"],
)
def test_a_failed_update_resumes_generation(start_sender):
    double = StockDouble()
    sender = start_sender(double)
    double.faults = {"update_weights": "out of memory on rank 0"}
    with refused("server-refused", problem="out of memory on rank 0"):
        sender.send(tensors_of(1).items(), version=1)
    assert [call for call in double.calls if call != "/init_weight_transfer_engine"] == [*UPDATE, "/resume"]
    double.faults = {}
    sender.send(tensors_of(2).items(), version=2)
    assert equal(double.served, tensors_of(2))


@pytest.mark.scenario(clauses=["server-dialects/the-vllm-dialect-drives-a-stock-vllm-server#3"])
@pytest.mark.parametrize("route", ["pause", "start_weight_update", "finish_weight_update", "resume"])
def test_no_call_follows_one_that_failed_but_the_last(start_sender, route):
    double = StockDouble()
    sender = start_sender(double)
    double.faults = {route: "no"}
    with refused("server-refused"):
        sender.send(tensors_of(1).items(), version=1)
    place = GOOD.index(f"/{route}")
    expected = GOOD if route == "resume" else [*GOOD[: place + 1], "/resume"]
    assert [call for call in double.calls if call != "/init_weight_transfer_engine"] == expected


def test_a_restarted_server_is_joined_again(start_sender):
    doubles = [StockDouble() for _ in range(2)]
    sender = start_sender(*doubles)
    sender.send(tensors_of(1).items(), version=1)
    doubles[1].restart()
    sender.send(tensors_of(2).items(), version=2)
    assert all(equal(double.served, tensors_of(2)) for double in doubles)


def test_an_adapter_is_not_sent_alone(start_sender):
    sender = start_sender(StockDouble())
    with refused("adapter-unproven"):
        sender.send_adapter(None, version=1)
    sender.send(tensors_of(1).items(), version=1)


@pytest.mark.scenario("server-dialects/a-stock-server-with-another-weight-transfer-engine-is-rejected-before-training")
def test_a_server_with_another_engine_is_rejected_when_the_sender_is_made(start_sender):
    right, wrong = StockDouble(), StockDouble()
    right.backend, wrong.backend = GlooTransport.backend, "nccl"
    with refused("weights-not-taken", remedy=f'--weight-transfer-config \'{{"backend": "{GlooTransport.backend}"}}\''):
        start_sender(right, wrong)
    assert right.calls == wrong.calls == ["/server_info"]


@pytest.mark.parametrize(
    ("version", "at_init"), [("0.26.0", False), ("0.27.1", False), ("0.28.0", True), ("0.32.0+cpu", True)]
)
def test_how_tensors_are_packed_is_said_once(version, at_init):
    transport = NcclTransport(torch.device("cuda", 0), version)
    address = GroupAddress(host="h", port=1, rank=0, world_size=4, timeout_s=5, join_timeout_s=5)
    init, update = transport.init_info(address, 2), transport.update_info(Plan(specs=(), order=(), buckets=()))
    assert (PACKED.items() <= init.items(), PACKED.items() <= update.items()) == (at_init, not at_init)
    place = {"master_address": "h", "master_port": 1, "rank_offset": 2, "world_size": 4}
    assert place.items() <= init.items()


def test_a_group_is_left_once(start_sender):
    double = StockDouble()
    sender = start_sender(double)
    sender.send(tensors_of(1).items(), version=1)
    for _ in range(2):
        sender.close()
    assert double.calls.count("/shutdown_weight_transfer_engine") == 1
