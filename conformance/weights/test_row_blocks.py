"""A weight that is merged block by block of rows is bit for bit the one that is merged at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmatch.model import merge
from rollmatch.model.merge import LoraFactors, merge_weight


@pytest.fixture(autouse=True, scope="module")
def _small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "_BLOCK", 512)
        yield


@given(
    rows=st.integers(0, 70),
    columns=st.integers(1, 130),
    rank=st.integers(1, 9),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    is_dora=st.booleans(),
    seed=st.integers(0, 9),
)
def test_blocks_of_rows_change_no_bit(rows, columns, rank, dtype, is_dora, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    factors = LoraFactors(
        lora_a=torch.randn(rank, columns, generator=generator),
        lora_b=torch.randn(rows, rank, generator=generator),
        magnitude=torch.rand(rows, generator=generator) if is_dora else None,
        scaling=0.5,
    )
    at_once = merge._merge_whole(weight, factors)
    assert torch.equal(merge_weight(weight, factors), at_once)
    assert torch.equal(merge_weight(weight, factors, out=torch.empty_like(weight)), at_once)
