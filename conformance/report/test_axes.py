"""Axes: round ticks, finite places."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmatch.report.axes import step_axis, value_axis

values = st.floats(min_value=-1e15, max_value=1e15)


@settings(deadline=None)
@given(values, values, values)
def test_a_value_axis_covers_its_range_and_places_are_finite(low, high, value):
    low, high = sorted((low, high))
    axis = value_axis(low, high, start=200.0, end=12.0)
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert axis.low <= low + slack
    assert axis.high >= high - slack
    assert 2 <= len(axis.ticks) <= 9
    assert all(12.0 <= axis.place(one) <= 200.0 for one in (low, high, value))


@settings(deadline=None)
@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 1e6))
def test_larger_values_stand_higher(one, other, top):
    axis = value_axis(0.0, top, start=200.0, end=12.0)
    low, high = sorted((one, other))
    assert axis.place(high) <= axis.place(low)


def test_ends_of_the_range_land_on_the_ends_of_the_axis():
    axis = value_axis(0.0, 1.0, start=200.0, end=12.0)
    assert (axis.place(0.0), axis.place(0.5), axis.place(1.0)) == (200.0, 106.0, 12.0)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_step_ticks_are_whole_steps_inside_the_range(first, length):
    axis = step_axis(first, first + length, start=48.0, end=448.0)
    assert 1 <= len(axis.ticks) <= 9
    assert all(first <= tick.value <= first + length and tick.value == int(tick.value) for tick in axis.ticks)
    assert all(math.isfinite(axis.place(tick.value)) for tick in axis.ticks)


@pytest.mark.parametrize(
    ("high", "as_percent", "labels"),
    [
        (0.05, True, ["0%", "1%", "2%", "3%", "4%", "5%"]),
        (1.0, True, ["0%", "20%", "40%", "60%", "80%", "100%"]),
        (0.003, False, ["0", "0.001", "0.002", "0.003"]),
        (2_500.0, False, ["0", "500", "1k", "1.5k", "2k", "2.5k"]),
        (3e6, False, ["0", "1M", "2M", "3M"]),
    ],
)
def test_labels_are_short_and_distinct(high, as_percent, labels):
    assert [tick.label for tick in value_axis(0.0, high, start=0.0, end=1.0, as_percent=as_percent).ticks] == labels
