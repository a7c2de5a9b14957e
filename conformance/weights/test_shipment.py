"""What travels: bytes of every tensor in the order of the plan, and digests of exactly these bytes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmatch.weights.bucket import Buffer
from rollmatch.weights.digest import digest_of
from rollmatch.weights.flight import MAX_IN_FLIGHT, Flight
from rollmatch.weights.plan import make_plan, spec_of
from rollmatch.weights.shipment import Shipment
from rollmatch.weights.worker.blocks import Blocks

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])


def make(kinds):
    generator = torch.Generator().manual_seed(0)
    return [(f"t{i}", (torch.randn(n, generator=generator) * 99).to(dtype)) for i, (dtype, n) in enumerate(kinds)]


@given(st.lists(st.tuples(DTYPES, st.integers(0, 9)), min_size=1, max_size=12), st.integers(1, 80))
def test_as_many_pieces_as_may_be_under_way_are_whole_at_a_time(kinds, bucket_bytes):
    named = make(kinds)
    plan = make_plan([spec_of(*pair) for pair in named], bucket_bytes=bucket_bytes)
    shipment = Shipment(plan, [tensor for _, tensor in named])
    under_way, arrived = [], b""
    for piece in shipment.pieces([Buffer() for _ in range(MAX_IN_FLIGHT + 1)]):
        if len(under_way) == MAX_IN_FLIGHT:
            arrived += bytes(under_way.pop(0).numpy())
        under_way.append(piece)
    arrived += b"".join(bytes(piece.numpy()) for piece in under_way)
    ordered = [named[place][1] for place in plan.order]
    digests = [digest_of(tensor) for tensor in ordered]
    sent = b"".join(bytes(tensor.view(torch.uint8).numpy()) for tensor in ordered)
    assert arrived == sent + b"".join(digests)
    assert shipment.digests == tuple(digest.hex() for digest in digests)


def test_tensors_travel_in_the_type_of_the_plan():
    plan = make_plan([spec_of("a", torch.zeros(2, dtype=torch.bfloat16))], bucket_bytes=64)
    first, _ = Shipment(plan, [torch.tensor([1.5, -2.0], requires_grad=True)]).pieces(
        [Buffer() for _ in range(MAX_IN_FLIGHT + 1)]
    )
    assert first.view(torch.bfloat16).tolist() == [1.5, -2.0]


def test_a_flight_has_few_under_way_and_ends_them_in_order():
    told = []

    def begin(number):
        told.append(f"begin {number}")
        return lambda: told.append(f"land {number}")

    flight = Flight(begin)
    for number in range(MAX_IN_FLIGHT + 1):
        flight.add(number, then=lambda number=number: told.append(f"then {number}"))
    begun = [f"begin {number}" for number in range(MAX_IN_FLIGHT)]
    assert told == [*begun, "land 0", f"begin {MAX_IN_FLIGHT}", "then 0"]
    flight.land()
    assert told[-2:] == [f"land {MAX_IN_FLIGHT}", f"then {MAX_IN_FLIGHT}"]


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
