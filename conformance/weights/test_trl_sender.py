"""What older dialects need to be told, and that only texts are read from their store."""

import doctest
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from conformance.refusals import refused
from conformance.server.calls import in_thread
from conformance.server.instance import free_port
from rollmatch.dialects.native.group import Rendezvous
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.dialects.session import DIALECTS, ClientSettings, RolloutServer
from rollmatch.dialects.trl import sender as trl_sender
from rollmatch.dialects.trl.sender import TrlSender
from rollmatch.rollout.weight_sender import make_sender
from rollmatch.weights import stateless
from rollmatch.weights.gloo import open_gloo
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.stateless import StatelessGroup

MEETING = Rendezvous(host="127.0.0.1", port=1, client="learner", timeout_s=1, join_timeout_s=1)


def servers_of(*dialects):
    servers = [RolloutServer(f"http://h:{place}", ClientSettings()) for place, _ in enumerate(dialects, 1)]
    for server, dialect in zip(servers, dialects, strict=True):
        server.dialect = DIALECTS[dialect](server.base_url)
    return servers


def test_the_examples_hold():
    assert doctest.testmod(trl_sender).failed == 0
    assert doctest.testmod(stateless).failed == 0


def test_a_store_that_waits_for_its_workers_becomes_ready():
    """ms-swift's and TRL's servers hold such a one: vLLM's ``StatelessProcessGroup`` counts those who enter."""
    port, limit = free_port(), timedelta(seconds=10)

    def hold():
        store = TCPStore("127.0.0.1", port, 2, True, limit)
        return open_gloo(PrefixStore("gloo", store), address_of(port, rank=0))

    held = in_thread(hold)
    group = StatelessGroup(address_of(port, rank=1))
    assert held.result(timeout=10).size() == group.address.world_size == 2


def address_of(port, *, rank):
    return GroupAddress(host="127.0.0.1", port=port, rank=rank, world_size=2, timeout_s=5, join_timeout_s=5)


def test_the_dialect_decides_the_way():
    assert isinstance(make_sender(servers_of("native", "native"), [MEETING] * 2), NativeSender)
    assert isinstance(make_sender(servers_of("swift", "swift"), [MEETING] * 2), TrlSender)
    assert isinstance(make_sender(servers_of("trl"), [MEETING]), TrlSender)


def test_servers_of_two_dialects_are_refused():
    with refused("dialects-mixed", "http://h:1") as caught:
        make_sender(servers_of("native", "swift"), [MEETING] * 2)
    assert caught.value.remedy


def test_a_server_that_proves_nothing_gets_no_adapter_alone():
    with refused("adapter-unproven"):
        TrlSender(servers_of("swift"), [MEETING]).send_adapter("adapter", version=1)
