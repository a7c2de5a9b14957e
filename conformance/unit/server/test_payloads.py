"""Ids, digests and bodies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from rollmatch.data.ids import PackedIds, pack_ids, unpack_ids
from rollmatch.weights.digest import bytes_of, digest_of

packed = TypeAdapter(PackedIds)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_ids_survive_as_bytes_and_as_lists(ids):
    assert unpack_ids(pack_ids(ids)).tolist() == ids
    assert packed.validate_python(ids) == packed.validate_python(pack_ids(ids)) == pack_ids(ids)
    assert len(pack_ids(ids)) == 4 * len(ids)


@pytest.mark.parametrize("wrong", [b"abc", [1.5], ["1"], [True], [-1], [2**31], "12", None])
def test_what_is_no_list_of_ids_is_refused(wrong):
    with pytest.raises(ValidationError):
        packed.validate_python(wrong)


def test_a_digest_sees_every_bit_and_only_bytes():
    tensor = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    assert (
        digest_of(tensor) == digest_of(tensor.clone()) == digest_of(tensor.reshape(4, 3)) == digest_of(bytes_of(tensor))
    )
    assert digest_of(tensor.t()) == digest_of(tensor.t().contiguous()) != digest_of(tensor)
    for place in range(0, 12 * 16, 7):
        flipped = tensor.clone()
        flipped.view(torch.uint8).view(-1)[place // 8] ^= 1 << (place % 8)
        assert digest_of(flipped) != digest_of(tensor)
    assert len(digest_of(torch.zeros(()))) == len(digest_of(torch.zeros(0))) == 16
