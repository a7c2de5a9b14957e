"""Advantages are about the group, whatever the rewards' level."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmatch.objectives.grpo.advantage import STD_FLOOR, group_advantages

rewards = st.floats(-10, 10).map(lambda value: round(value, 3))
groups = st.lists(st.lists(rewards, min_size=2, max_size=8), min_size=1, max_size=5)


@given(groups, st.sampled_from(["mean", "leave_one_out"]), st.sampled_from(["group", "batch", "none"]))
def test_advantages_of_a_group_sum_to_zero(drawn, baseline, scale):
    for group in group_advantages(drawn, baseline=baseline, scale=scale):
        assert sum(group) == pytest.approx(0, abs=1e-6 * max(1, max(map(abs, group))))


@given(groups)
def test_scaled_advantages_are_plain_ones_over_the_spread(drawn):
    plain, scaled = group_advantages(drawn, scale="none"), group_advantages(drawn, scale="group")
    for group, before, after in zip(drawn, plain, scaled, strict=True):
        spread = statistics.stdev(group) + STD_FLOOR
        assert after == pytest.approx([value / spread for value in before], rel=1e-6, abs=1e-9)


@given(groups)
def test_batch_scaling_takes_one_spread_for_all(drawn):
    everything = [reward for group in drawn for reward in group]
    spread = statistics.stdev(everything) + STD_FLOOR
    plain, scaled = group_advantages(drawn, scale="none"), group_advantages(drawn, scale="batch")
    for before, after in zip(plain, scaled, strict=True):
        assert after == pytest.approx([value / spread for value in before], rel=1e-6, abs=1e-9)


@given(st.lists(rewards, min_size=2, max_size=8))
def test_leave_one_out_compares_with_the_others(group):
    (found,) = group_advantages([group], baseline="leave_one_out", scale="none")
    for place, advantage in enumerate(found):
        others = group[:place] + group[place + 1 :]
        assert advantage == pytest.approx(group[place] - statistics.fmean(others), abs=1e-9)


def test_a_completion_without_reward_is_in_no_mean():
    assert group_advantages([[4.0, None, 0.0]], scale="none") == [[2.0, 0.0, -2.0]]
    assert group_advantages([[4.0, None]], scale="none") == [[0.0, 0.0]]


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.7])
def test_equal_rewards_are_exactly_zero(reward):
    assert group_advantages([[reward] * 7]) == [[0.0] * 7]
