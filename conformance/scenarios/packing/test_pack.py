"""Packing: carry-only, atomic, oldest first, exactly optimal, and indifferent to a stop in between."""

import itertools
import subprocess
import sys
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.refusals import refused
from conformance.doubles.segments import ids_of, make_packer, plain_segment, plain_segments
from rollmatch.learn.pack import fullest_subset, pack

lengths_and_capacity = st.tuples(st.lists(st.integers(1, 12), max_size=10), st.integers(0, 40))


def brute_force(lengths, capacity):
    """The best sum; among equals the lowest indices, compared from the first."""
    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(len(lengths)), size) for size in range(len(lengths) + 1)
    )
    fitting = [subset for subset in subsets if sum(lengths[i] for i in subset) <= capacity]
    best = max(sum(lengths[i] for i in subset) for subset in fitting)
    return min(subset for subset in fitting if sum(lengths[i] for i in subset) == best)


@pytest.mark.scenario(
    "packing/a-gap-is-filled-exactly",
    "packing/the-older-of-two-equal-choices",
    clauses=["packing/a-row-is-filled-as-well-as-can-be-oldest-first#1,2,3,4,5"],
)
@pytest.mark.parametrize("lengths", [(6, 3, 2, 2), (6, 3, 2, 2, 2)])
def test_a_fuller_row_beats_the_first_that_fits(lengths):
    packer = make_packer(*lengths)
    row = packer.pop_row()
    assert ids_of(row.segments) == [0, 2, 3]
    assert row.num_tokens == row.capacity == 10
    assert ids_of(packer.state()) == [i for i in range(len(lengths)) if i not in (0, 2, 3)]


@pytest.mark.scenario(clauses=["packing/a-row-is-filled-as-well-as-can-be-oldest-first#2,3"])
@given(lengths_and_capacity)
def test_the_subset_is_the_optimum_and_the_oldest_one(case):
    lengths, capacity = case
    assert fullest_subset(lengths, capacity=capacity) == brute_force(lengths, capacity)


def check_refusal(packer, segments, *refusal, remedies=()):
    """Nothing of what is refused stays."""
    before = packer.state()
    with refused(*refusal) as caught:
        packer.add(segments)
    assert all(remedy in caught.value.remedy for remedy in remedies)
    packer.state().clear()
    assert packer.state() == before


@pytest.mark.scenario(
    "packing/a-segment-that-is-too-long",
    "packing/a-segment-of-exactly-one-row",
    clauses=["packing/packing-happens-after-the-rollouts#5", "packing/a-segment-is-never-split#1,2,3,4"],
)
def test_a_segment_longer_than_a_row_is_refused_and_changes_nothing():
    packer, remedies = make_packer(4), ("global_max_length", "max_new_tokens", "overlong")
    longer = [plain_segment(3, 1), plain_segment(11, 2)]
    check_refusal(packer, longer, "segment-too-long", "train.jsonl:3", remedies=remedies)
    packer.add([plain_segment(3, 1), plain_segment(10, 2)])
    assert packer.buffered == 3
    with refused("segment-too-long", "train.jsonl:1"):
        packer.restore(plain_segments(11))
    packer.restore(plain_segments(10))
    assert packer.buffered == 1


@pytest.mark.scenario(
    "packing/one-segment-too-many",
    "packing/as-many-segments-as-allowed",
    clauses=["packing/the-waiting-list-is-bounded#1,2"],
)
def test_an_overfull_buffer_is_refused_and_changes_nothing():
    packer = make_packer(1, 1, max_buffered=3)
    check_refusal(packer, plain_segments(1, 1), "packing-buffer-full", "max_buffered")
    packer.add(plain_segments(1))
    assert packer.buffered == 3


@pytest.mark.scenario("packing/a-row-without-segments-is-refused", clauses=["packing/the-waiting-list-is-bounded#5"])
def test_an_empty_buffer_has_no_row():
    packer = make_packer()
    with refused("nothing-to-pack", "training.packing"):
        packer.pop_row()
    packer.add(plain_segments(1))
    assert packer.pop_row().num_tokens == 1


def test_a_full_buffer_packs_within_20_ms():
    packer = make_packer(*(700 + 37 * i % 4001 for i in range(512)), capacity=16_384)
    assert min(timeit.repeat(packer.pop_row, number=1, repeat=3)) < 0.020


def test_packing_and_masking_need_no_torch():
    modules = "rollmatch.learn.pack, rollmatch.objectives.rollout_matching.supervision"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_sequence_longer_than_a_row_is_an_error():
    with pytest.raises(ValueError, match="11 tokens does not fit a row of 10"):
        pack([3, 11], capacity=10)
