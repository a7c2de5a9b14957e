"""A worker's side of groups of swift and TRL: when its port is free, and whether the trainer lives."""

import gc
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from conformance.doubles.refusals import refused
from conformance.judge.ports import free_port
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.worker.receiver import Receiver

TRAINER = """
import sys, time
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.stateless import StatelessGroup
limits = {"timeout_s": 30, "join_timeout_s": 60}
group = StatelessGroup(GroupAddress(host="127.0.0.1", port=int(sys.argv[1]), rank=1, world_size=2, **limits))
print("joined", flush=True)
time.sleep(600)
"""


def start(port, *, join_timeout_s):
    address = GroupAddress(
        host="127.0.0.1", port=port, rank=0, world_size=2, timeout_s=5, join_timeout_s=join_timeout_s
    )
    return Receiver.start(address, transport="stateless", device=torch.device("cpu"))


def wait_until(is_so, within_s=20):
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture
def without_collector():
    """Nobody breaks circles of references."""
    gc.disable()
    yield
    gc.enable()


def test_a_group_that_is_left_while_nobody_joins_frees_its_port(without_collector):
    port = free_port()
    receiver = start(port, join_timeout_s=600)
    assert listens(port)
    receiver.close()
    wait_until(lambda: not listens(port))


@pytest.mark.scenario(clauses=["server-dialects/the-trl-dialect-serves-trl-and-verifiers-trainers#13"])
def test_a_group_that_nobody_joins_in_time_frees_its_port(without_collector):
    port = free_port()
    receiver = start(port, join_timeout_s=1.0)
    receiver.wait(60)
    with refused("communicator-timeout", f"group_port {port}"):
        receiver.progress()
    wait_until(lambda: not listens(port))


@pytest.mark.scenario(clauses=["server-dialects/the-trl-dialect-serves-trl-and-verifiers-trainers#12,14"])
def test_a_trainer_that_died_is_told_from_one_that_is_idle():
    port = free_port()
    receiver = start(port, join_timeout_s=120)
    with subprocess.Popen([sys.executable, "-c", TRAINER, str(port)], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout.readline() == "joined\n"
        receiver.wait(60)
        assert not receiver.progress().is_busy
        assert not receiver.has_lost_a_member()
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        wait_until(receiver.has_lost_a_member)
    receiver.close()
