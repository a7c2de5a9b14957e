"""Tensors go into bytes and come out of them bit for bit; a digest shows when they did not."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.refusals import refused
from rollmatch.weights.digest import Buffer, bytes_of, check_digests, cut, digests_of

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.int64])
KINDS = st.lists(st.tuples(DTYPES, st.lists(st.integers(0, 5), max_size=3).map(tuple)), max_size=8)


def make(kinds, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-99, 99, shape, generator=generator).to(dtype) for dtype, shape in kinds]


@given(KINDS)
def test_filling_and_cutting_are_inverse(kinds):
    tensors = make(kinds)
    found = cut(Buffer().fill(list(map(bytes_of, tensors))), kinds)
    assert all(torch.equal(one, other) for one, other in zip(tensors, found, strict=True))


@given(st.lists(KINDS, max_size=4))
def test_a_buffer_can_be_used_again(several):
    buffer = Buffer()
    for seed, kinds in enumerate(several):
        tensors = make(kinds, seed)
        assert digests_of(cut(buffer.fill(list(map(bytes_of, tensors))), kinds)) == digests_of(tensors)


def test_a_transposed_tensor_goes_in_as_it_reads():
    tensor = torch.arange(6.0).view(2, 3).t()
    (found,) = cut(Buffer().fill([bytes_of(tensor)]), [(torch.float32, (3, 2))])
    assert torch.equal(found, tensor)


@given(st.integers(0, 23), st.integers(0, 7))
def test_a_flipped_bit_is_found_and_named(place, bit):
    sent = make([(torch.float32, (3,)), (torch.float32, (3,))])
    held = [tensor.clone() for tensor in sent]
    held[place // 12].view(torch.uint8)[place % 12] ^= 1 << bit
    with refused("digest-mismatch", "ab"[place // 12]):
        check_digests(["a", "b"], digests_of(sent), digests_of(held), server="http://s:1")
    check_digests(["a", "b"], digests_of(sent), digests_of([t.clone() for t in sent]), server="http://s:1")


def test_a_proof_of_fewer_tensors_is_none():
    with refused("digest-mismatch", "b"):
        check_digests(["a", "b"], ["1", "2"], ["1"], server="http://s:1")
