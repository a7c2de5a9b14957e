"""The digest that GPUs make: it sees every change."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmatch.weights.digest import add_mixed, mixed_digest_of, mixed_digests

RAW = st.binary(min_size=1, max_size=70)
M = 2**64 - 1


def plain(raw):
    """The same, number by number, from the definition."""
    raw += bytes(-len(raw) % 8)
    sums = [0, 0]
    for place in range(len(raw) // 8):
        x = (int.from_bytes(raw[place * 8 : place * 8 + 8], "little") + (place + 1) * 0x9E3779B97F4A7C15) & M
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & M
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & M
        x ^= x >> 31
        sums = [(sums[0] + x) & M, (sums[1] + ((x ^ x >> 32) * 0xD6E8FEB86659FD93 & M)) & M]
    return b"".join(number.to_bytes(8, "little") for number in sums)


def tensor_of(raw):
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


@given(RAW)
def test_it_is_what_its_definition_says(raw):
    assert mixed_digest_of(tensor_of(raw)) == plain(raw)


@given(RAW, st.data())
def test_a_changed_byte_changes_both_halves(raw, data):
    place = data.draw(st.integers(0, len(raw) - 1))
    other = bytearray(raw)
    other[place] ^= data.draw(st.integers(1, 255))
    before, after = mixed_digest_of(tensor_of(raw)), mixed_digest_of(tensor_of(other))
    assert before[:8] != after[:8]
    assert before[8:] != after[8:]


@given(st.lists(RAW, min_size=1, max_size=5))
def test_several_at_once_are_each_by_itself(parts):
    sums = torch.zeros(len(parts), 2, dtype=torch.int64)
    add_mixed([tensor_of(part) for part in parts], sums)
    assert mixed_digests(sums) == [plain(part) for part in parts]


def test_a_large_tensor_is_the_sum_of_its_parts():
    raw = torch.arange(2**20 + 3, dtype=torch.int64)
    assert mixed_digest_of(raw) == mixed_digest_of(raw.view(torch.uint8))
    moved = raw.clone()
    moved[[1, 2**20 + 1]] = moved[[2**20 + 1, 1]]
    assert mixed_digest_of(moved) != mixed_digest_of(raw)
