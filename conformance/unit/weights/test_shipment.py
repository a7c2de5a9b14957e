"""What travels: bytes of every tensor in the order of the plan, and digests of exactly these bytes."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmatch.weights.digest import Buffer, digest_of, pieces_of
from rollmatch.weights.gloo import MAX_IN_FLIGHT, Blocks, InFlight
from rollmatch.weights.plan import OutgoingWeights, WeightTransfer, make_plan, spec_of

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])


def buffers():
    return [Buffer() for _ in range(MAX_IN_FLIGHT + 1)]


def make(kinds):
    generator = torch.Generator().manual_seed(0)
    return [(f"t{i}", (torch.randn(n, generator=generator) * 99).to(dtype)) for i, (dtype, n) in enumerate(kinds)]


@given(st.lists(st.tuples(DTYPES, st.integers(0, 9)), min_size=1, max_size=12), st.integers(1, 80))
def test_as_many_pieces_as_may_be_under_way_are_whole_at_a_time(kinds, bucket_bytes):
    named = make(kinds)
    plan = make_plan([spec_of(*pair) for pair in named], bucket_bytes=bucket_bytes)
    ordered = [named[index][1] for index in plan.order]
    under_way, arrived, announced = [], b"", []
    for piece in pieces_of(WeightTransfer(plan=plan, tensors=tuple(ordered)), buffers(), announced):
        if len(under_way) == MAX_IN_FLIGHT:
            arrived += bytes(under_way.pop(0).numpy())
        under_way.append(piece)
    arrived += b"".join(bytes(piece.numpy()) for piece in under_way)
    digests = [digest_of(tensor) for tensor in ordered]
    sent = b"".join(bytes(tensor.view(torch.uint8).numpy()) for tensor in ordered)
    assert arrived == sent + b"".join(digests)
    assert announced == digests


def test_tensors_travel_in_the_type_of_the_plan():
    plan = make_plan([spec_of("a", torch.zeros(2, dtype=torch.bfloat16))], bucket_bytes=64)
    transfer = WeightTransfer(plan=plan, tensors=(torch.tensor([1.5, -2.0], requires_grad=True),))
    first, _ = pieces_of(transfer, buffers(), [])
    assert first.view(torch.bfloat16).tolist() == [1.5, -2.0]


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
