"""Ids, digests and bodies."""

import time

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

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


class _Listed(BaseModel):
    prompt_token_ids: list[list[int]]
    response_token_ids: list[list[int]]


def test_packed_ids_are_twenty_times_cheaper_than_lists_in_json():
    prompts, responses = ([list(range(length))] * 128 for length in (1500, 1000))
    listed = _Listed(prompt_token_ids=prompts, response_token_ids=responses)
    ready = {name: [pack_ids(row) for row in rows] for name, rows in listed.model_dump().items()}

    def timed(work):
        began = time.process_time()
        work()
        return time.process_time() - began

    def as_json():
        _Listed.model_validate_json(listed.model_dump_json())

    def as_bytes():
        for rows in msgspec.msgpack.decode(msgspec.msgpack.encode(ready)).values():
            for row in rows:
                unpack_ids(row)

    assert min(timed(as_json) for _ in range(3)) > 20 * min(timed(as_bytes) for _ in range(5))
