"""Numbers as people read them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmatch.report.numbers import compact, duration, finite, fixed, percent, plain

ODD = [None, True, "3", [], {}, float("nan"), math.inf, -math.inf, 10**400, 1e300]


@pytest.mark.parametrize("value", ODD)
def test_what_is_no_finite_number_is_a_dash_everywhere(value):
    assert finite(value) is None
    assert {compact(value), duration(value), percent(value), plain(value)} == {"-"}
    assert fixed(value) == "    -"


@settings(deadline=None)
@given(st.floats(min_value=-999.0, max_value=99_999.0))
def test_fixed_always_takes_five_characters_and_keeps_the_value(value):
    text = fixed(value)
    assert len(text) == 5
    assert float(text) == pytest.approx(value, abs=max(0.0051, 0.51 if abs(value) >= 99 else 0.051))


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=10**15))
def test_compact_keeps_three_digits(value):
    text = compact(value)
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1])
    number = float(text[:-1]) * scale if scale else float(text)
    assert number == pytest.approx(value, rel=0.006)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (59.9, "59.9 s"),
        (60, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (86_400, "1 d 0 h"),
    ],
)
def test_durations_change_units_at_their_borders(seconds, text):
    assert duration(seconds) == text
