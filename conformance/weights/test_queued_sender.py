"""What older dialects need to be told, and that only texts are read from their store."""

import doctest
import pickle
from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from conformance.server.calls import in_thread
from conformance.server.instance import free_port
from rollmatch.dialects import queued_sender
from rollmatch.dialects.native.group import Rendezvous
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.dialects.queued_sender import QueuedSender
from rollmatch.dialects.session import DIALECTS, ClientSettings, RolloutServer
from rollmatch.errors import SyncError
from rollmatch.rollout.weight_sender import make_sender
from rollmatch.weights import stateless
from rollmatch.weights.gloo import open_gloo
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.stateless import StatelessGroup, read_text

MEETING = Rendezvous(host="127.0.0.1", port=1, client="learner", timeout_s=1, join_timeout_s=1)


class HarmfulPeer:
    def __reduce__(self):
        return (print, ("run",))


def servers_of(*dialects):
    servers = [RolloutServer(f"http://h:{place}", ClientSettings()) for place, _ in enumerate(dialects, 1)]
    for server, dialect in zip(servers, dialects, strict=True):
        server.dialect = DIALECTS[dialect](server.base_url)
    return servers


def test_the_examples_hold():
    assert doctest.testmod(queued_sender).failed == 0
    assert doctest.testmod(stateless).failed == 0


def test_a_pickle_that_is_no_text_is_not_run(capsys):
    with pytest.raises(ValueError, match="not expected"):
        read_text(pickle.dumps(HarmfulPeer()))
    assert capsys.readouterr().out == ""
    assert read_text(pickle.dumps("barrier_1")) == "barrier_1"


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
    assert isinstance(make_sender(servers_of("native", "native"), [1, 2], MEETING), NativeSender)
    assert isinstance(make_sender(servers_of("swift", "swift"), [1, 2], MEETING), QueuedSender)
    assert isinstance(make_sender(servers_of("trl"), [1], MEETING), QueuedSender)


@pytest.mark.parametrize(
    ("dialects", "code"), [(("native", "swift"), "dialects-mixed"), (("vllm",), "weights-not-taken")]
)
def test_servers_that_cannot_be_served_are_refused(dialects, code, monkeypatch):
    """On a machine with GPUs: a stock server there would want NCCL."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SyncError) as caught:
        make_sender(servers_of(*dialects), [1] * len(dialects), MEETING)
    assert (caught.value.code, caught.value.key) == (code, "http://h:1")
    assert caught.value.remedy


def test_a_server_that_proves_nothing_gets_no_adapter_alone():
    with pytest.raises(SyncError) as caught:
        QueuedSender(servers_of("swift"), [1], MEETING).send_adapter("adapter", version=1)
    assert caught.value.code == "adapter-unproven"
