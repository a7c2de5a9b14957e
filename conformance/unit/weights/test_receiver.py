"""A worker's receiver: what was dropped while it arrived does not spoil what comes next."""

import threading

import pytest
import torch

from conformance.doubles.refusals import refused
from rollmatch.weights.digest import digest_of
from rollmatch.weights.plan import Spec
from rollmatch.weights.transfer_plan import TransferPlan
from rollmatch.weights.worker.receiver import Receiver


class ReceiverGroup:
    """Every broadcast carries the same bytes over and over, and ends when it may."""

    rank, content = 0, (1,)

    def __init__(self):
        self.may_end = threading.Event()

    def begin(self, memory):
        memory.copy_(torch.tensor([*self.content], dtype=torch.uint8).repeat(len(memory) // len(self.content)))
        return self.may_end.wait

    def close(self):
        pass


def plan(digest, **fields):
    return TransferPlan(tensors=(Spec("a", "uint8", (4,)),), buckets=(1,), digests=(digest.hex(),), **fields)


def settle(receiver):
    receiver.wait(20)
    assert not receiver.progress().is_busy


@pytest.mark.parametrize("dropped", [True, False])
def test_a_mismatch_of_what_was_dropped_is_no_failure(dropped):
    group, right = ReceiverGroup(), digest_of(torch.ones(4, dtype=torch.uint8))
    receiver = Receiver.joining(lambda: group)
    receiver.begin(plan(bytes(16)))
    if dropped:
        receiver.drop()
    group.may_end.set()
    if dropped:
        settle(receiver)
    else:
        with refused("digest-mismatch", "a"):
            settle(receiver)
        receiver.drop()
    receiver.begin(plan(right))
    settle(receiver)
    assert receiver.take()["a"].tolist() == [1, 1, 1, 1]
    receiver.close()


def test_a_receiver_outlives_what_it_cannot_receive():
    """A thread that ended would leave every later sync waiting."""
    group = ReceiverGroup()
    group.may_end.set()
    receiver = Receiver.joining(lambda: group)
    settle(receiver)
    receiver.begin(TransferPlan(tensors=(Spec("a", "no such type", (4,)),), buckets=(1,)))
    with refused("transfer-failed"):
        settle(receiver)
    receiver.drop()
    receiver.begin(plan(digest_of(torch.ones(4, dtype=torch.uint8))))
    settle(receiver)
    assert receiver.take()["a"].tolist() == [1, 1, 1, 1]
    receiver.close()


def test_a_group_that_cannot_be_opened_is_a_failure_and_no_success():
    def fail():
        raise TypeError("a world of 2**40")

    with refused("transfer-failed"):
        settle(Receiver.joining(fail))


@pytest.mark.parametrize("content", [(255,), (128, 127), (128, 255)], ids=["NaN", "infinity", "minus infinity"])
def test_weights_that_are_not_finite_are_refused_and_the_next_ones_taken(content):
    """Bytes of ones are a finite bfloat16; those of 0xff are NaN."""
    group = ReceiverGroup()
    group.may_end.set()
    receiver = Receiver.joining(lambda: group)
    specs = (Spec("a", "bfloat16", (2,)), Spec("b", "bfloat16", (2,)))
    announced = TransferPlan(tensors=specs, buckets=(1, 1))
    group.content = content
    receiver.begin(announced)
    with refused("weights-not-finite", "a"):
        settle(receiver)
    receiver.drop()
    group.content = (1,)
    receiver.begin(announced)
    settle(receiver)
    receiver.begin(TransferPlan(tensors=(Spec("c", "bfloat16", (2,)),), buckets=(1,)))  # as swift and trl announce
    settle(receiver)
    assert set(receiver.take()) == {"a", "b", "c"}
    receiver.close()


class Keeping(torch.nn.Module):
    """Loads by keeping a tensor as it is (``a``), or by copying it (``b``)."""

    def __init__(self):
        super().__init__()
        self.b = torch.nn.Buffer(torch.zeros(4, dtype=torch.uint8))

    def load_weights(self, tensors):
        found = dict(tensors)
        self.a = torch.nn.Buffer(found["a"])
        self.b.copy_(found["b"])


def test_memory_that_a_model_keeps_is_not_received_into():
    """Its weights stay those of the last update while the next one arrives."""
    group, model = ReceiverGroup(), Keeping()
    group.may_end.set()
    receiver = Receiver.joining(lambda: group)
    for number in (1, 2, 3):
        group.content = (number,)
        receiver.begin(TransferPlan(tensors=(Spec("a", "uint8", (4,)), Spec("b", "uint8", (4,))), buckets=(1, 1)))
        settle(receiver)
        assert number == 1 or model.a.tolist() == model.b.tolist() == [number - 1] * 4
        receiver.load_into(model)
    receiver.close()


def test_matrices_that_arrive_swapped_are_kept_as_they_are_stored():
    group, sent = ReceiverGroup(), torch.arange(12, dtype=torch.uint8).view(2, 3, 2)
    group.may_end.set()
    group.content = range(12)
    receiver = Receiver.joining(lambda: group)
    receiver.begin(TransferPlan(tensors=(Spec("a", "uint8", (2, 2, 3)),), buckets=(1,), swapped=("a",)))
    settle(receiver)
    assert torch.equal(receiver.take()["a"], sent.mT)
    receiver.close()
