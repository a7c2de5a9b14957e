"""Groups that are opened and closed leave nothing behind: no thread, no descriptor, on either side."""

import gc
import os
import time

import pytest

from conformance.doubles.instance import free_port
from conformance.doubles.learner_side import connected, rendezvous
from conformance.judge.calls import RawLearner
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.dialects.trl.sender import TrlSender

pytestmark = pytest.mark.engine
MAX_GROWTH = 2
"""Connections that happen to be open while descriptors are counted."""
MAX_ROUNDS, SETTLE_S = 4, 15


def open_and_close(server, _weights):
    learner = RawLearner(server, port=free_port())
    assert learner.open()[0] == 200
    assert learner.close()[0] == 200


def wait_in_vain(server, _weights):
    """Nobody joins."""
    body = RawLearner(server, port=free_port()).request_body(join_timeout_s=0.05)
    assert server.post("/native/communicator/", body)[1]["code"] == "communicator-timeout"


def sync_by(make_sender):
    def sync(server, weights):
        sender = make_sender([connected(server.url)])
        try:
            sender.send(weights.items(), version=server.version + 1)
        finally:
            sender.close()

    return sync


USES = {
    "opened": (30, open_and_close),
    "in vain": (30, wait_in_vain),
    "direct": (4, sync_by(lambda servers: NativeSender(servers, rendezvous(), transport="direct", stage=False))),
    "trl": (4, sync_by(lambda servers: TrlSender(servers, [rendezvous()]))),
}
"""How many groups, and what is done with each."""
LONG = ("in vain", "trl")


def held(pids):
    """Descriptors and threads of all processes."""
    gc.collect()
    return [len(os.listdir(f"/proc/{pid}/{kind}")) for pid in pids for kind in ("fd", "task")]


@pytest.mark.scenario(clauses=["weight-sync/weights-travel-in-memory#5"])
@pytest.mark.parametrize("use", [pytest.param(use, marks=[pytest.mark.wide] * (use in LONG)) for use in USES])
def test_groups_leave_no_threads_and_no_descriptors(instance, server, policies, use):
    """Pools of threads grow up to their size, on a busy machine later; what leaks grows with every round."""
    num_groups, use_group = USES[use]
    pids = [os.getpid(), instance.process.pid, *(worker.pid for worker in instance.workers())]
    counts = []
    for _ in range(MAX_ROUNDS):
        before = held(pids)
        for _ in range(num_groups):
            use_group(server, policies[0].weights)
        counts.append((before, after := settled(pids, before)))
        if not has_grown(before, after):
            return
    raise AssertionError(counts)


def has_grown(before, after):
    return any(now > then + MAX_GROWTH for then, now in zip(before, after, strict=True))


def settled(pids, before):
    """What is held once it is no more than before, or after ``SETTLE_S``."""
    deadline = time.monotonic() + SETTLE_S
    while has_grown(before, after := held(pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return after
