"""Who may join a group, where its sockets listen, and what a stranger at its port can do: nothing."""

import ctypes
import os
import pickle
import socket
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import ClassVar

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from conformance.doubles.instance import free_port
from conformance.doubles.refusals import refused
from conformance.judge.servers.bounded import in_thread
from rollmatch.weights.gloo import GlooGroup
from rollmatch.weights.group_address import CommunicatorTimeout, GroupAddress, TransferFailed, check_address
from rollmatch.weights.group_store import DROP, GO, GroupStore, _Channel
from rollmatch.weights.stateless import StatelessGroup, begin_on, read_nccl_id, read_text
from rollmatch.weights.worker.receiver import SyncDropped, wait_go

SECRET = "between these ranks only"


def address_of(rank, port, *, world_size=2, **fields):
    defaults = {"host": "127.0.0.1", "secret": SECRET, "timeout_s": 5.0, "join_timeout_s": 10.0}
    return GroupAddress(rank=rank, port=port, world_size=world_size, **defaults | fields)


@contextmanager
def two_ranks():
    """Two open ranks of a group."""
    port = free_port()
    first = in_thread(GlooGroup.open, address_of(0, port))
    second = GlooGroup.open(address_of(1, port))
    yield first.result(timeout=10), second
    for group in (first.result(), second):
        group.close()


@pytest.fixture
def pair():
    with two_ranks() as groups:
        yield groups


def listening():
    return {
        (each.laddr.ip, each.laddr.port)
        for each in psutil.Process().net_connections(kind="inet")
        if each.status == psutil.CONN_LISTEN
    }


def test_every_rank_listens_at_the_groups_host_only():
    before = listening()
    with two_ranks() as (first, _):
        opened = listening() - before
        assert ("127.0.0.1", first.address.port) in opened
        assert {host for host, _ in opened} == {"127.0.0.1"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_is_no_host_of_a_group(host):
    with refused("group-address-invalid", "host"):
        GroupStore(address_of(0, free_port(), host=host))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("secret", "s" * 15),
        ("world_size", 4097),
        ("world_size", 0),
        ("rank", 2),
        ("rank", -1),
        ("join_timeout_s", float("inf")),
        ("timeout_s", float("nan")),
    ],
)
def test_an_impossible_address_is_refused_before_anything_is_opened(key, value):
    before, fields = listening(), {"rank": 0, "port": free_port()} | {key: value}
    with refused("group-address-invalid", key):
        GlooGroup.open(address_of(**fields))
    assert listening() == before


def test_an_address_at_its_bounds_is_possible():
    check_address(address_of(4095, 1, world_size=4096, secret="s" * 16))
    check_address(address_of(0, 1, world_size=1))


def test_whoever_does_not_know_the_secret_is_not_admitted(pair):
    port = pair[0].address.port
    with pytest.raises(CommunicatorTimeout) as caught:
        GroupStore(address_of(1, port, secret="another group's secret", join_timeout_s=0.5))
    assert "secret" in caught.value.problem
    pair[1].store.give_verdict("1", GO)
    assert pair[0].store.wait_verdict("1") == GO


def test_strangers_take_no_place_from_members(pair):
    port = pair[0].address.port
    for _ in range(100):
        socket.create_connection(("127.0.0.1", port)).close()
    member = GroupStore(address_of(1, port))
    member.give_verdict("1", GO)
    assert pair[0].store.wait_verdict("1") == GO
    member.close()


def test_a_store_that_does_not_know_the_secret_is_not_joined():
    """It accepts every answer to its challenge, and answers a member's own with what it has made up."""

    def pretend(listener):
        while True:
            channel = _Channel(listener.accept()[0])
            channel.send_bytes(b"#CHALLENGE#" + os.urandom(20))
            channel.recv_bytes()
            channel.send_bytes(b"#WELCOME#")
            asked.append(channel.recv_bytes()[: len(b"#CHALLENGE#")])
            channel.send_bytes(os.urandom(16))

    asked = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        in_thread(pretend, listener)
        with pytest.raises(CommunicatorTimeout) as caught:
            GroupStore(address_of(1, listener.getsockname()[1], join_timeout_s=0.5))
    assert "secret" in caught.value.problem
    assert set(asked) == {b"#CHALLENGE#"}


def test_a_stranger_can_neither_read_nor_drop_a_sync(pair):
    """A TCPStore client could, where a group opens in a TCPStore."""
    first, second = pair
    with pytest.raises((RuntimeError, ValueError)):
        TCPStore("127.0.0.1", first.address.port, 2, False, timedelta(seconds=1)).set("sync/1/verdict", "drop")
    with socket.create_connection(("127.0.0.1", first.address.port), timeout=5) as raw:
        raw.sendall(b"\xff" * 64)
        raw.settimeout(10)
        while raw.recv(1024):
            pass  # the challenge, then the end
    tensor = torch.zeros(4)
    receiving = in_thread(first.broadcast, tensor)
    second.broadcast(torch.ones(4))
    receiving.result(timeout=5)
    assert tensor.tolist() == [1.0] * 4


def test_who_says_nothing_is_sent_away_in_time(pair):
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", pair[0].address.port), timeout=30) as raw:
        while raw.recv(1024):
            pass
    assert 4 < time.monotonic() - began < 8


def test_a_worker_receives_at_the_learners_go_and_not_at_its_drop(pair):
    learner, worker = pair[0].store, pair[1].store
    assert not learner.is_ready("1", [1], within_s=0)
    learner.give_verdict("1", GO)
    wait_go(worker, "1")
    assert learner.is_ready("1", [1], within_s=0)
    waiting = in_thread(learner.is_ready, "2", [1], within_s=60)
    worker.set_ready("2")
    assert waiting.result(timeout=5)
    learner.give_verdict("2", DROP)
    with pytest.raises(SyncDropped):
        wait_go(worker, "2")


def test_a_rank_that_does_not_come_ends_the_wait_of_the_others(pair):
    with pytest.raises(TransferFailed, match="some rank did not come"):
        pair[1].store.wait(["never"], timedelta(seconds=0.1))


def test_a_member_that_waits_hears_of_the_stores_end(pair):
    waiting = in_thread(pair[1].store.wait_verdict, "never")
    pair[0].close()
    with pytest.raises(TransferFailed):
        waiting.result(timeout=3)
    with pytest.raises(TransferFailed):
        pair[1].store.set("later", "1")


def test_closed_groups_leave_no_thread_and_no_descriptor():
    for times in (1, 5):
        before = threading.active_count(), psutil.Process().num_fds()
        for _ in range(times):
            with two_ranks():
                pass
    for _ in range(100):
        after = threading.active_count(), psutil.Process().num_fds()
        if after[0] <= before[0] and after[1] <= before[1]:
            break
        threading.Event().wait(0.05)
    assert after[0] <= before[0]
    assert after[1] <= before[1]


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_a_worker_runs_no_pickle_from_the_store_of_swift_and_trl(tmp_path):
    """Anybody who reaches the port can write there; vLLM's own barrier would run it."""
    port, mark = free_port(), tmp_path / "run"
    ranks = [in_thread(StatelessGroup, address_of(rank, port, world_size=3)) for rank in range(2)]
    learner = StatelessGroup(address_of(2, port, world_size=3))
    first, second = (rank.result(timeout=10) for rank in ranks)
    stranger = TCPStore("127.0.0.1", port, 3, False, timedelta(seconds=5), wait_for_workers=False)
    stranger.set("broadcast_from/0/0", pickle.dumps(Harmful(str(mark))))
    receiving = in_thread(second.broadcast, torch.zeros(2))
    for group in (first, learner):  # the bytes only: nobody else names a barrier
        in_thread(lambda group=group: begin_on(group._group, torch.ones(2), source=2, timeout_s=5.0).wait())
    with refused("transfer-failed"):
        receiving.result(timeout=10)
    assert not mark.exists()


@pytest.mark.parametrize(
    "packed",
    [
        b"\x80\x04r\xff\xff\xff\x7f.",  # a memo of 2 GB entries: 7 bytes that took 8 GB
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\x00\x00\x00.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\x00\x00\x00.",
        b"I" + b"9" * 4000 + b"\n.",
        pickle.dumps("x" * 5000),
        pickle.dumps(["a"]),
        pickle.dumps(b"a"),
        b"",
        b"\xff",
    ],
)
def test_a_pickle_of_a_stranger_takes_no_memory(packed):
    for read in (read_text, lambda raw: read_nccl_id(raw, 128)):
        with pytest.raises(ValueError, match=r".*"):
            read(packed)


def test_the_pickles_of_peers_are_read():
    class ncclUniqueId(ctypes.Structure):  # vLLM's name
        _fields_: ClassVar = [("internal", ctypes.c_byte * 128)]

    made = ncclUniqueId.from_buffer_copy(bytes(range(128)))
    globals()["ncclUniqueId"] = ncclUniqueId
    ncclUniqueId.__qualname__ = "ncclUniqueId"
    for protocol in range(3, 6):
        assert read_nccl_id(pickle.dumps(made, protocol), 128) == bytes(range(128)), protocol
        assert read_text(pickle.dumps("barrier_7", protocol)) == "barrier_7"
