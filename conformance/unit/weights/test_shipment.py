"""What travels: bytes of every tensor in the order of the plan, and digests of exactly these bytes."""

from dataclasses import replace

import torch

from rollmatch.weights.gloo import MAX_IN_FLIGHT, Blocks, InFlight
from rollmatch.weights.plan import OutgoingWeights


def test_weights_that_are_made_as_they_are_sent_travel_in_the_order_in_which_they_are_made():
    named = [("small", torch.zeros(1)), ("large", torch.ones(9))]
    held = OutgoingWeights.of(named)
    for weights, names in (held, ["large", "small"]), (replace(held, is_held=False), ["small", "large"]):
        plan = weights.plan(weights.specs, bucket_bytes=100, tail_bytes=4)
        sent = [tensor.tolist() for tensor in weights.transfer(plan).tensors]
        assert [spec.name for spec in plan.specs] == names
        assert sent == [dict(named)[name].tolist() for name in names]


def test_few_broadcasts_are_in_flight_and_end_in_order():
    events = []

    def begin(number):
        events.append(f"begin {number}")
        return lambda: events.append(f"land {number}")

    in_flight = InFlight(begin)
    for number in range(MAX_IN_FLIGHT + 1):
        in_flight.add(number, then=lambda number=number: events.append(f"then {number}"))
    begun = [f"begin {number}" for number in range(MAX_IN_FLIGHT)]
    assert events == [*begun, "land 0", f"begin {MAX_IN_FLIGHT}", "then 0"]
    in_flight.wait()
    assert events[-2:] == [f"land {MAX_IN_FLIGHT}", f"then {MAX_IN_FLIGHT}"]


def test_memory_is_used_again_and_never_twice_at_a_time():
    blocks = Blocks()
    first, second = blocks.take(8), blocks.take(8)
    assert first.data_ptr() != second.data_ptr()
    blocks.give_back([first])
    assert blocks.take(8).data_ptr() == first.data_ptr()
    assert blocks.take(8).data_ptr() not in (first.data_ptr(), second.data_ptr())


def test_memory_of_an_older_plan_is_let_go():
    blocks = Blocks()
    blocks.give_back([blocks.take(8), blocks.take(16)])
    blocks.take(24)
    assert not blocks._free
