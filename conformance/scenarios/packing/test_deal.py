"""Segments are shared out among passes and ranks by their tokens; every pass with no padded token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.loss_cases import RULES, ScoringSupervisor
from conformance.doubles.models import TOLERANCE, assert_same_gradients, gradients, make_packed_model
from conformance.doubles.ranks import alone, together
from conformance.doubles.segments import make_segment, plain_segment
from rollmatch.learn.balance import PassSize, RowBalancer, balance, spread_longest_first
from rollmatch.learn.batch import Batcher
from rollmatch.learn.head import Scoring, logprobs_of
from rollmatch.learn.score import score_segments
from rollmatch.objectives.rollout_matching.loss import count_totals, masked_loss_of_kept

CAPACITY = 12
lengths_of_ranks = st.lists(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=9), min_size=1, max_size=4)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 9))
def test_parts_of_about_as_many_tokens_hold_each_sequence_once(lengths, num_parts):
    parts = spread_longest_first(lengths, num_parts)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert parts == [sorted(part) for part in parts]
    totals = [sum(lengths[index] for index in part) for part in parts]
    assert max(totals) - min(totals) <= max(lengths, default=0)


@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=40), st.integers(1, 5))
def test_rows_hold_each_sequence_once_and_are_as_many_on_every_rank(lengths, num_ranks):
    rows = balance(list(zip(lengths, lengths, strict=True)), capacity=CAPACITY, num_ranks=num_ranks)
    assert len(rows) == num_ranks
    num_rows = len(rows[0])
    assert {len(mine) for mine in rows} == {num_rows}
    assert sorted(index for mine in rows for row in mine for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= CAPACITY for mine in rows for row in mine)
    if len(lengths) >= num_ranks:
        assert all(mine[0] for mine in rows)
    fewest = -(-sum(lengths) // (CAPACITY * num_ranks))
    if num_rows > fewest:  # one row less was too few: its fullest would be within a sequence of the mean
        assert sum(lengths) / (num_ranks * (num_rows - 1)) > CAPACITY - max(lengths)


def test_a_sequence_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="13 tokens does not fit a row of 12"):
        balance([(3, 3), (13, 13)], capacity=CAPACITY, num_ranks=1)


def deal_over_ranks(lengths_of_ranks, capacity):
    """Rows of each rank; a segment's sample id is 100 * its rank + its place there."""

    def work(ranks):
        made = [plain_segment(length, 100 * ranks.rank + i) for i, length in enumerate(lengths_of_ranks[ranks.rank])]
        return RowBalancer(ranks=ranks, capacity=capacity).rows_of(made, num_rows=1)

    return together(len(lengths_of_ranks), work)


@pytest.mark.scenario(clauses=["packing/the-number-of-passes-may-follow-from-the-tokens#2,3"])
@given(lengths_of_ranks)
def test_no_segment_is_lost_or_learnt_twice_among_ranks(lengths_of_ranks):
    rows = deal_over_ranks(lengths_of_ranks, CAPACITY)
    assert len({len(mine) for mine in rows}) == 1
    found = {one.sample.sample_id: one.encoded_len for mine in rows for row in mine for one in row.segments}
    made = {100 * rank + i: length for rank, mine in enumerate(lengths_of_ranks) for i, length in enumerate(mine)}
    assert found == made
    assert sum(len(row.segments) for mine in rows for row in mine) == len(made)
    assert all(row.num_tokens <= CAPACITY == row.capacity for mine in rows for row in mine)


@pytest.mark.scenario(
    "packing/ranks-with-unequal-segments-run-as-many-passes", "packing/a-rank-without-a-segment-left-takes-part"
)
@pytest.mark.parametrize(
    ("made", "expected"),
    [([[6, 6, 3, 3], [2]], [[[6], [3, 2]], [[6], [3]]]), ([[6, 6], [6]], [[[6], [6]], [[6], []]])],
)
def test_ranks_run_as_many_passes_of_about_as_many_tokens(made, expected):
    assert [[list(row.lengths) for row in mine] for mine in deal_over_ranks(made, 7)] == expected


@pytest.fixture(scope="module")
def cases():
    """Uneven segments, some with images."""
    return [make_segment(seed, num_images=count) for seed, count in enumerate((3, 0, 2, 0, 0, 1, 0))]


def features_of(cases):
    images = {segment.sample.sample_id: some for segment, some in cases}
    return lambda sample: images[sample.sample_id]


def limit_of(cases):
    return max(segment.encoded_len for segment, _ in cases)


@pytest.mark.scenario(clauses=["packing/the-number-of-passes-may-follow-from-the-tokens#1"])
def test_passes_add_up_to_the_loss_and_gradient_of_one_row_whatever_their_number(cases):
    model, segments = make_packed_model(), [segment for segment, _ in cases]

    def learnt(capacity):
        batcher = Batcher(
            model, ScoringSupervisor(), packer=None, pad_id=0, balancer=RowBalancer(ranks=alone(), capacity=capacity)
        )
        batches = batcher.make(segments, features_of(cases), num_batches=1)
        totals = count_totals([batch.supervision for batch in batches])
        model.zero_grad()
        for batch in (*batches, batcher.idle(capacity or 1)):
            rules = {"supervision": batch.supervision, "rules": RULES, "totals": totals}
            loss, _ = Scoring(None)(model, batch.inputs, lambda logits, k=rules: masked_loss_of_kept(logits, **k).total)
            loss.backward()
        return batches, gradients(model)

    (whole,), expected = learnt(None)
    batches, found = learnt(limit_of(cases))
    assert len(batches) > 1
    assert max(batch.inputs["input_ids"].numel() for batch in batches) <= limit_of(cases)
    assert sum(batch.inputs["input_ids"].numel() for batch in batches) == whole.num_tokens, "nothing is padded"
    assert_same_gradients(found, expected)


@pytest.mark.scenario(clauses=["packing/the-number-of-passes-may-follow-from-the-tokens#5"])
def test_log_probabilities_of_packed_rows_are_those_of_padded_batches(cases):
    model, segments, sizes = make_packed_model(), [segment for segment, _ in cases], []
    model.register_forward_pre_hook(lambda _, args, inputs: sizes.append(inputs["input_ids"].numel()), with_kwargs=True)

    def scored(size):
        return score_segments(model, segments, features_of(cases), logprobs=logprobs_of, size=size)

    expected = scored(PassSize(segments=3))
    sizes.clear()
    found = scored(PassSize(segments=3, tokens=limit_of(cases)))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)
    assert max(sizes) <= limit_of(cases)
    assert sum(sizes) == sum(segment.encoded_len for segment in segments)


def test_without_segments_there_is_no_pass_to_score():
    assert PassSize(segments=5, tokens=5).split([]) == PassSize(segments=5).split([]) == []
