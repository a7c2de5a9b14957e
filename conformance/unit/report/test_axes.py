"""Axes and numbers as people read them; who was busy when."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.runs import START_S, run_event, step_events
from rollmatch.report.axes import step_axis, value_axis
from rollmatch.report.gantt import LEFT, RIGHT, make_gantt
from rollmatch.report.history import make_history
from rollmatch.report.numbers import compact, duration, finite, fixed, percent, plain

values = st.floats(min_value=-1e15, max_value=1e15)


@given(values, values, values)
def test_a_value_axis_covers_its_range_and_places_are_finite(low, high, value):
    low, high = sorted((low, high))
    axis = value_axis(low, high, start=200.0, end=12.0)
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert axis.low <= low + slack
    assert axis.high >= high - slack
    assert 2 <= len(axis.ticks) <= 9
    assert all(12.0 <= axis.place(one) <= 200.0 for one in (low, high, value))


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 1e6))
def test_larger_values_stand_higher_and_ends_at_the_ends(one, other, top):
    axis = value_axis(0.0, top, start=200.0, end=12.0)
    low, high = sorted((one, other))
    assert axis.place(high) <= axis.place(low)
    unit = value_axis(0.0, 1.0, start=200.0, end=12.0)
    assert (unit.place(0.0), unit.place(0.5), unit.place(1.0)) == (200.0, 106.0, 12.0)


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


ODD = [None, True, "3", [], {}, float("nan"), math.inf, -math.inf, 10**400, 1e300]


@pytest.mark.parametrize("value", ODD)
def test_what_is_no_finite_number_is_a_dash_everywhere(value):
    assert finite(value) is None
    assert {compact(value), duration(value), percent(value), plain(value)} == {"-"}
    assert fixed(value) == "    -"


@given(st.floats(min_value=-999.0, max_value=99_999.0))
def test_fixed_always_takes_five_characters_and_keeps_the_value(value):
    text = fixed(value)
    assert len(text) == 5
    assert float(text) == pytest.approx(value, abs=max(0.0051, 0.51 if abs(value) >= 99 else 0.051))


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


SECONDS = 10.0


def timeline(step, *, rank=0, calls=None, **changes):
    """Ten seconds: the learner waits 2, syncs 1, learns 7; two servers write for the next step."""
    began = START_S + SECONDS * step
    spans = (("rollout", 0, 2), ("sync", 2, 3), ("learn", 3, 10))
    calls = [[0, began + 3, began + 9, step + 1], [1, began + 3, began + 12, step + 1]] if calls is None else calls
    learner = [[name, began + start, began + end] for name, start, end in spans]
    head = {"event": "timeline", "time": began + SECONDS, "rank": rank, "step": step}
    return {**head, "began": began, "ended": began + SECONDS, "calls": calls, "learner": learner, **changes}


def history_of(num_steps, *more, **overlap):
    overlap = {"rollout_s": 6.0, "learn_s": 7.0, "efficiency": 0.7, "servers_idle": 0.3} | overlap
    steps = [
        event | ({"overlap": overlap, "staleness": {"1": 3, "0": 1}} if event["event"] == "step" else {})
        for step in range(1, num_steps + 1)
        for event in step_events(step)
    ]
    return make_history([run_event(), *steps, *(timeline(step) for step in range(num_steps)), *more])


def test_servers_and_learner_have_a_lane_each_on_one_clock():
    gantt = make_gantt(history_of(2))
    assert [lane.label for lane in gantt.lanes] == ["server 0", "server 1", "learner"]
    first, _ = gantt.lanes[0].bars
    assert (first.kind, first.text) == ("call-1", "rollouts of step 2, 6.00 s")
    assert first.x == gantt.x.place(3.0)
    assert first.width == pytest.approx(gantt.x.place(9.0) - gantt.x.place(3.0), abs=0.01)
    assert [bar.kind for bar in gantt.lanes[2].bars] == ["waits", "sync", "learn"] * 2
    assert [text for _, text in gantt.borders] == ["1", "2"]


def test_lanes_are_24_high_with_bars_that_can_be_seen():
    calls = [(10.25, 10.75), (14.0, 14.001), (15.0, 15.33), (17.0, 16.0)]
    brief = timeline(1, calls=[[0, START_S + begin, START_S + end, 2] for begin, end in calls])
    brief.pop("rank")
    gantt = make_gantt(make_history([run_event(), timeline(0), brief]))
    assert [(lane.y, [(bar.x, bar.width) for bar in lane.bars]) for lane in gantt.lanes] == [
        (8.0, [(211.2, 254.4), (518.6, 21.2), (677.6, 0.6), (720.0, 13.99)]),
        (32.0, [(211.2, 381.6)]),
        (56.0, [(84.0, 84.8), (168.8, 42.4), (211.2, 296.8), (508.0, 84.8), (592.8, 42.4), (635.2, 296.8)]),
    ]
    assert (gantt.borders, gantt.bottom, gantt.height) == (((84.0, "1"), (508.0, "2")), 80.0, 122.0)
    assert gantt.kinds == ("call-1", "call-0", "waits", "sync", "learn")
    texts = ["waits, 2.00 s", "sync, 1.00 s", "learn, 7.00 s"]
    learnt = [f"step {step}: {text}" for step in (1, 2) for text in texts]
    assert [bar.text for bar in gantt.lanes[2].bars] == learnt
    assert [tick.label for tick in gantt.x.ticks] == ["0", "5", "10", "15", "20"]


def test_only_the_last_steps_are_drawn_and_nothing_outside_the_frame():
    gantt = make_gantt(history_of(20))
    assert [text for _, text in gantt.borders] == ["15", "16", "17", "18", "19", "20"]
    for lane in gantt.lanes:
        assert all(bar.x >= LEFT and bar.x + bar.width <= RIGHT + 1 for bar in lane.bars)


def test_every_rank_is_a_learner_and_one_engine_no_numbered_server():
    gantt = make_gantt(history_of(1, timeline(0, rank=1, calls=[])))
    assert [lane.label for lane in gantt.lanes] == ["server 0", "server 1", "learner 0", "learner 1"]
    calls = [[0, START_S + 3, START_S + 9, 1]]
    gantt = make_gantt(make_history([run_event(), timeline(0, calls=calls)]))
    assert [lane.label for lane in gantt.lanes] == ["rollouts", "learner"]
    assert gantt.figures == ()


def test_figures_are_means_and_staleness_is_counted():
    assert make_gantt(history_of(4, sync_s=0.125, learner_idle=float("nan"))).figures == (
        ("rollout R, s", "6.00"),
        ("learning L, s", "7.00"),
        ("sync, s", "0.12"),
        ("servers idle", "30.0%"),
        ("learner idle", "-"),
        ("efficiency, max(R, L) / step", "0.700"),
        ("rollouts 0 steps old", "4"),
        ("rollouts 1 step old", "12"),
    )


def test_a_run_without_timelines_has_no_picture():
    assert make_gantt(make_history([run_event(), *step_events(1)])) is None
    broken = timeline(0, began=None)
    assert make_gantt(make_history([run_event(), broken])) is None
