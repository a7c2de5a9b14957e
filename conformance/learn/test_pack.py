"""Packing: carry-only, atomic, oldest first, exactly optimal, and indifferent to a stop in between."""

import itertools
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.learn.segments import plain_segment, plain_segments
from rollmatch.learn.pack import NothingToPack, Packer, PackingBufferFull, SegmentTooLong, fullest_subset

lengths_and_capacity = st.tuples(st.lists(st.integers(1, 12), max_size=10), st.integers(0, 40))


def make_packer(capacity=10, max_buffered=512, min_fill_ratio=0.65):
    return Packer(capacity, max_buffered=max_buffered, min_fill_ratio=min_fill_ratio)


def ids_of(segments):
    return [segment.sample.sample_id for segment in segments]


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
    packer = make_packer(capacity=10)
    packer.add(plain_segments(*lengths))
    row = packer.pop_row()
    assert ids_of(row.segments) == [0, 2, 3]
    assert row.num_tokens == row.capacity == 10
    assert ids_of(packer.state()) == [i for i in range(len(lengths)) if i not in (0, 2, 3)]


@pytest.mark.scenario(clauses=["packing/a-row-is-filled-as-well-as-can-be-oldest-first#2,3"])
@given(lengths_and_capacity)
def test_the_subset_is_the_optimum_and_the_oldest_one(case):
    lengths, capacity = case
    assert fullest_subset(lengths, capacity=capacity) == brute_force(lengths, capacity)


@given(st.lists(st.integers(1, 10), min_size=1, max_size=30))
def test_every_segment_leaves_once_whole_and_the_oldest_leaves_first(lengths):
    packer, segments = make_packer(capacity=10), plain_segments(*lengths)
    packer.add(segments)
    out = []
    while packer.buffered:
        oldest = packer.state()[0]
        row = packer.pop_row()
        assert row.segments[0] is oldest
        assert row.num_tokens <= 10
        assert ids_of(row.segments) == sorted(ids_of(row.segments))
        out += row.segments
    assert sorted(out, key=lambda segment: segment.sample.sample_id) == segments


@given(
    st.lists(st.lists(st.integers(1, 10), min_size=1, max_size=4), min_size=2, max_size=8),
    st.integers(0, 7),
)
def test_a_restored_packer_goes_on_identically(batches, stop_at):
    straight, resumed = make_packer(), make_packer()
    counter = itertools.count()
    rows = []
    for step, lengths in enumerate(batches):
        segments = [plain_segment(length, next(counter)) for length in lengths]
        if step == stop_at % len(batches):
            resumed = make_packer()
            resumed.restore(straight.state())
        straight.add(segments)
        if step >= stop_at % len(batches):
            resumed.add(segments)
            rows.append((straight.pop_row(), resumed.pop_row()))
        else:
            straight.pop_row()
    assert all(one == other for one, other in rows)
    assert straight.state() == resumed.state()


@pytest.mark.scenario(
    "packing/a-segment-that-is-too-long",
    "packing/a-segment-of-exactly-one-row",
    clauses=["packing/packing-happens-after-the-rollouts#5", "packing/a-segment-is-never-split#1,2,3,4"],
)
def test_a_segment_longer_than_a_row_is_refused_and_changes_nothing():
    packer = make_packer(capacity=10)
    packer.add(plain_segments(4))
    before = packer.state()
    with pytest.raises(SegmentTooLong) as caught:
        packer.add([plain_segment(3, 1), plain_segment(11, 2)])
    assert (caught.value.code, caught.value.key) == ("segment-too-long", "train.jsonl:3")
    for remedy in ("global_max_length", "max_new_tokens", "training.packing"):
        assert remedy in caught.value.remedy
    assert packer.state() == before
    packer.add([plain_segment(3, 1), plain_segment(10, 2)])
    assert packer.buffered == 3


@pytest.mark.scenario(
    "packing/one-segment-too-many",
    "packing/as-many-segments-as-allowed",
    clauses=["packing/the-waiting-list-is-bounded#1,2"],
)
def test_an_overfull_buffer_is_refused_and_changes_nothing():
    packer = make_packer(max_buffered=3)
    packer.add(plain_segments(1, 1))
    before = packer.state()
    with pytest.raises(PackingBufferFull) as caught:
        packer.add(plain_segments(1, 1))
    assert (caught.value.code, caught.value.key) == ("packing-buffer-full", "training.packing_buffer")
    assert packer.state() == before
    packer.add(plain_segments(1))
    assert packer.buffered == 3


def test_a_state_of_a_larger_row_is_not_restored():
    packer = make_packer(capacity=10)
    with pytest.raises(SegmentTooLong) as caught:
        packer.restore(plain_segments(11))
    assert caught.value.key == "train.jsonl:1"
    packer.restore(plain_segments(10))
    assert packer.buffered == 1


@pytest.mark.scenario("packing/a-row-without-segments-is-refused", clauses=["packing/the-waiting-list-is-bounded#5"])
def test_an_empty_buffer_has_no_row():
    packer = make_packer()
    with pytest.raises(NothingToPack) as caught:
        packer.pop_row()
    assert (caught.value.code, caught.value.key) == ("nothing-to-pack", "training.packing")
    packer.add(plain_segments(1))
    assert packer.pop_row().num_tokens == 1


@pytest.mark.parametrize(("length", "underfull"), [(6, True), (7, False)])
def test_a_row_is_underfull_below_the_threshold(length, underfull):
    packer = make_packer(capacity=10, min_fill_ratio=0.7)
    packer.add(plain_segments(length))
    assert packer.is_underfull(packer.pop_row()) is underfull


def test_the_state_is_a_copy():
    packer = make_packer()
    packer.add(plain_segments(1, 2))
    packer.state().clear()
    assert packer.buffered == 2


def test_a_full_buffer_packs_within_20_ms():
    packer = make_packer(capacity=16_384)
    packer.add(plain_segments(*(700 + 37 * i % 4001 for i in range(512))))
    best = min(_seconds_of_pop(packer) for _ in range(3))
    assert best < 0.020


def _seconds_of_pop(packer):
    start = time.perf_counter()
    packer.pop_row()
    return time.perf_counter() - start


def test_packing_and_masking_need_no_torch():
    modules = "rollmatch.learn.pack, rollmatch.objectives.rollout_matching.supervision"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
