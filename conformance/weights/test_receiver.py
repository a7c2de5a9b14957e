"""A worker's receiver: what was dropped while it arrived does not spoil what comes next."""

import threading
import time

import pytest
import torch

from rollmatch.errors import RollmatchError
from rollmatch.weights.digest import digest_of
from rollmatch.weights.worker.receiver import Receiver


class Group:
    """Every broadcast carries ones, and ends when it may."""

    rank = 0

    def __init__(self):
        self.may_end = threading.Event()

    def begin(self, memory):
        memory.fill_(1)
        return self.may_end.wait

    def close(self):
        pass


def plan(digest):
    return {"tensors": [["a", "uint8", [4]]], "buckets": [1], "digests": [digest.hex()]}


def settle(receiver):
    deadline = time.monotonic() + 20
    while receiver.poll()["state"] == "busy":
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("dropped", [True, False])
def test_a_mismatch_of_what_was_dropped_is_no_failure(dropped):
    group, right = Group(), digest_of(torch.ones(4, dtype=torch.uint8))
    receiver = Receiver.joining(lambda: group)
    receiver.begin(plan(bytes(16)))
    if dropped:
        receiver.drop()
    group.may_end.set()
    if dropped:
        settle(receiver)
    else:
        with pytest.raises(RollmatchError) as caught:
            settle(receiver)
        assert (caught.value.code, caught.value.key) == ("digest-mismatch", "a")
        receiver.drop()
    receiver.begin(plan(right))
    settle(receiver)
    assert receiver.take()["a"].tolist() == [1, 1, 1, 1]
    receiver.close()


def test_a_plan_is_named_again_by_the_last_one_that_may_be():
    receiver = Receiver.joining(Group)
    first = plan(bytes(16)) | {"sync_id": "1", "keep": True}
    assert receiver.whole(first) is first
    assert receiver.whole({"sync_id": "2", "like": "1"}) == first | {"sync_id": "2"}
    assert receiver.whole({"sync_id": "3", "like": "1"})["tensors"] is first["tensors"]
    receiver.whole(plan(bytes(16)) | {"sync_id": "4", "keep": False})
    assert receiver.whole({"sync_id": "5", "like": "1"})["sync_id"] == "5"
    for unknown in ("2", "4", ""):
        with pytest.raises(RollmatchError) as caught:
            receiver.whole({"sync_id": "6", "like": unknown})
        assert (caught.value.code, caught.value.key) == ("communicator-missing", "like")
    receiver.close()


def test_a_receiver_tells_which_share_of_the_tensors_has_come():
    group = Group()
    receiver = Receiver.joining(lambda: group)
    settle(receiver)
    receiver.begin(plan(digest_of(torch.ones(4, dtype=torch.uint8))))
    told = receiver.poll()
    assert (told["state"], told["share"]) == ("busy", 0.0)
    receiver._received.digests["a"] = ""  # as if it had come
    assert receiver.poll()["share"] == 1.0
    group.may_end.set()
    settle(receiver)
    receiver.close()
