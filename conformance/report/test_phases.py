"""Phase timing: bars that add up."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmatch.report.curves import BOTTOM, LEFT, RIGHT, TOP
from rollmatch.report.history import make_history
from rollmatch.report.phases import MAX_BARS, PHASES, make_phase_chart

seconds = st.one_of(st.floats(0, 1e6), st.just(float("nan")), st.none())
timing = st.fixed_dictionaries({}, optional=dict.fromkeys(PHASES[:-1], seconds))


def history(*timings, step_s=None):
    return make_history(
        {"event": "step", "step": number, "phase_s": phase_s, "step_s": step_s}
        for number, phase_s in enumerate(timings, start=1)
    )


def boxes(path):
    """(left, bottom, top, width) of each bar of a phase."""
    found = re.findall(r"M(\S+) (\S+)V(\S+)h(\S+)V(\S+)z", path)
    return [tuple(float(number) for number in (left, bottom, top, width)) for left, bottom, top, width, _ in found]


@settings(deadline=None)
@given(st.lists(timing, max_size=40))
def test_bars_stand_inside_the_frame(timings):
    chart = make_phase_chart(history(*timings))
    for row in chart.rows if chart else ():
        assert "nan" not in row.path
        for left, bottom, top, width in boxes(row.path):
            assert LEFT <= left < left + width <= RIGHT + 0.01
            assert TOP <= top < bottom <= BOTTOM


def test_totals_shares_and_the_rest_are_the_journals():
    chart = make_phase_chart(history({"rollout": 1.0, "learn": 2.5}, {"rollout": 2.0, "learn": 2.5}, step_s=5.0))
    table = {row.phase: (row.per_step, row.total, row.share) for row in chart.rows}
    assert table["rollout"] == ("1.50", "3.0 s", 0.3)
    assert table["learn"] == ("2.50", "5.0 s", 0.5)
    assert table["other"] == ("1.00", "2.0 s", 0.2)
    assert table["sync"] == ("0.00", "0.0 s", 0.0)
    assert (chart.total, chart.per_step) == ("10.0 s", "5.00")


def test_phases_stand_on_each_other():
    chart = make_phase_chart(history({"sync": 1.0, "rollout": 2.0, "learn": 2.0}))
    tops = {row.phase: boxes(row.path)[0][1:3] for row in chart.rows if row.path}
    assert tops["sync"][0] == BOTTOM
    assert tops["rollout"][0] == tops["sync"][1]
    assert tops["learn"] == (tops["rollout"][1], TOP)
    assert "other" not in [row.phase for row in chart.rows]


def test_long_runs_share_bars_and_keep_their_totals():
    chart = make_phase_chart(history(*[{"learn": 2.0}] * 500))
    learn = next(row for row in chart.rows if row.phase == "learn")
    assert chart.steps_per_bar == 6
    assert len(boxes(learn.path)) == 84 <= MAX_BARS
    assert chart.hover["steps"][:2] == ["1-6", "7-12"]
    assert chart.hover["lines"][PHASES.index("learn")]["text"][0] == "2.00 s"
    assert chart.total == "16 min 40 s"


@pytest.mark.parametrize("phase_s", [None, {}, "slow", {"learn": float("nan")}, {"learn": -1.0}])
def test_a_run_without_timing_has_no_chart(phase_s):
    assert make_phase_chart(history(phase_s)) is None
    assert make_phase_chart(history({"learn": 0.1})) is not None


def test_the_outer_bars_stand_equally_far_from_the_ends():
    learn = next(row for row in make_phase_chart(history(*[{"learn": 2.0}] * 10)).rows if row.phase == "learn")
    first, *_, last = boxes(learn.path)
    assert first[0] - LEFT == pytest.approx(RIGHT - (last[0] + last[3]), abs=0.02)
    assert first[0] > LEFT
