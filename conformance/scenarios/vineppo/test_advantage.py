"""Advantages telescope, spread over tokens and are normalised over the whole batch."""

from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.ranks import alone, together
from rollmatch.objectives.vineppo.advantage import normalize, spread, step_advantages

NUMBERS = st.floats(-10, 10)
BATCHES = st.lists(st.lists(NUMBERS, min_size=1, max_size=6), min_size=2, max_size=8)


@pytest.mark.scenario("vineppo/three-steps", clauses=["vineppo/advantages-telescope#1,2,3"])
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=12))
def test_advantages_telescope_to_the_return_minus_the_value_of_the_prompt(steps):
    values, rewards = [value for value, _ in steps], [reward for _, reward in steps]
    advantages = step_advantages(values, rewards)
    assert isclose(sum(advantages), sum(rewards) - values[0], abs_tol=1e-9)
    assert step_advantages((0.5, 0.5, 0.9), (0, 0, 1)) == pytest.approx((0, 0.4, 0.1)), "the decisive step is praised"
    assert spread((1.0, 2.0), (0, 2, 5)) == (1.0, 1.0, 2.0, 2.0, 2.0), "every token carries the advantage of its step"


@pytest.mark.scenario("vineppo/two-processes-normalise-together", clauses=["vineppo/advantages-telescope#4"])
@given(BATCHES, st.sampled_from(["whiten", "scale"]))
def test_ranks_normalise_as_one(batch, how):
    masks = [[place % 3 != 1 for place in range(len(row))] for row in batch]
    whole = normalize(batch, masks, how, alone().sum)

    def part(member):
        return normalize(batch[member.rank :: 2], masks[member.rank :: 2], how, member.sum)

    halves = together(2, part)
    for index, row in enumerate(whole):
        assert halves[index % 2][index // 2] == pytest.approx(row, abs=1e-5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: step_advantages((0.5, 0.5), (1.0,)),
        lambda: spread((1.0,), (0, 2, 5)),
        lambda: normalize([(1.0, 2.0)], [(True,)], "none", list),
        lambda: normalize([(1.0,), (2.0,)], [(True,)], "none", list),
    ],
)
def test_lists_of_other_lengths_are_not_paired(call):
    with pytest.raises(ValueError, match="zip"):
        call()
