"""Curves and phases: every drawn place is finite and inside the frame, every text is the journal's figure."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.runs import evaluated_event, step_events
from rollmatch.report.curves import BOTTOM, LEFT, PLOTS, RIGHT, TOP, make_charts, running_mean, thin
from rollmatch.report.history import make_history
from rollmatch.report.phases import PHASES, make_phase_chart

FIELDS = sorted({line.field for plot in PLOTS for line in plot.lines})
anything = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.integers(), st.none(), st.text(max_size=3), st.booleans()
)
step_figures = st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, anything))


def journal(figures, evaluations=()):
    steps = [{"event": "step", "step": number, **fields} for number, fields in figures]
    return make_history([*steps, *evaluations])


def chart(title, history):
    return next((one for one in make_charts(history) if one.title == title), None)


def places(path):
    numbers = [float(number) for number in re.findall(r"[^ ML]+", path)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


@given(st.lists(st.tuples(st.integers(0, 10**9), step_figures), max_size=12), st.lists(anything, max_size=3))
def test_whatever_the_journal_holds_is_drawn_inside_the_frame(figures, validation):
    evaluations = [
        {"event": "evaluated", "step": at, "metrics": {"f1": figure}} for at, figure in enumerate(validation)
    ]
    for one in make_charts(journal(figures, evaluations)):
        for stroke in one.strokes:
            drawn = [*places(stroke.path), *places(stroke.mean_path), *stroke.dots]
            assert drawn
            assert all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in drawn)
        assert all(LEFT <= x <= RIGHT for x in one.hover["x"])
        assert all(y is None or TOP <= y <= BOTTOM for line in one.hover["lines"] for y in line["y"])


def test_hover_texts_are_the_journals_figures():
    events = [*step_events(1)[-1:], evaluated_event(1, f1=0.4321)]
    f1 = chart("F1", make_history([*events, {"event": "step", "step": 2, "f1": 0.75}]))
    assert f1.hover["steps"] == [1, 2]
    assert [line["text"] for line in f1.hover["lines"]] == [[f"{events[0]['f1']:.3f}", "0.750"], ["0.432", None]]
    assert [stroke.latest for stroke in f1.strokes] == ["0.750", "0.432"]


def test_parts_of_rewards_and_what_these_have_logged_have_curves_of_their_own():
    parts = {"reward": 0.5, "reward/right": 0.75, "reward/short": 0.25, "metric/share/of_digits": 3.0}
    evaluated = {"event": "evaluated", "step": 2, "metrics": parts | {"reward/right": 1.0}}
    found = {one.title: one.strokes for one in make_charts(journal([(1, parts), (2, parts)], [evaluated]))}
    named = ["Reward", "Reward: right", "Reward: short", "Logged by rewards: share/of_digits"]
    assert list(found) == named
    assert [[stroke.latest for stroke in found[name]] for name in named[1:3]] == [["0.750", "1.000"], ["0.250"] * 2]


def test_a_gap_parts_the_line_and_is_counted():
    history = journal([(number, {"loss": float("nan") if number == 3 else 1.0}) for number in range(1, 6)])
    (stroke,) = chart("Loss", history).strokes
    assert stroke.path.count("M") == 2
    assert stroke.num_missing == 1
    whole = chart("Loss", journal([(number, {"loss": 1.0}) for number in range(1, 6)])).strokes[0]
    assert (whole.path.count("M"), whole.num_missing) == (1, 0)


def test_a_single_step_is_a_dot_and_a_plot_without_any_finite_value_is_left_out():
    (stroke,) = chart("Loss", journal([(1, {"loss": 2.0})])).strokes
    assert (stroke.path, len(stroke.dots), stroke.latest) == ("", 1, "2.000")
    assert chart("Gradient norm", journal([(1, {"grad_norm": float("inf")}), (2, {})])) is None


columns = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=300)


@given(columns, st.integers(4, 60))
def test_extremes_and_ends_survive_within_the_limit(column, limit):
    kept = thin([column], limit=limit)
    assert list(kept) == sorted(set(kept))
    assert len(kept) <= limit + 2
    assert {0, len(column) - 1} <= set(kept)
    known = [value for value in column if value is not None]
    if known:
        survivors = [column[row] for row in kept if column[row] is not None]
        assert (min(survivors), max(survivors)) == (min(known), max(known))


@given(columns, st.integers(1, 9))
def test_a_running_mean_stays_between_its_neighbours(column, window):
    means = running_mean(column, window=window)
    assert [mean is None for mean in means] == [value is None for value in column]
    for row, mean in enumerate(means):
        if mean is not None:
            around = column[max(0, row - window // 2) : row + window // 2 + 1]
            known = [value for value in around if value is not None]
            assert min(known) - 1e-6 <= mean <= max(known) + 1e-6


def test_lines_dots_and_texts_of_a_chart():
    """From 48 to 448 across and from 200 up to 12, in round parts."""
    figures = [(1, {"f1": 0.25}), (2, {"f1": None}), (3, {"f1": 1.0}), (5, {"f1": 0.5})]
    evaluations = [{"event": "evaluated", "step": at, "metrics": {"f1": f1}} for at, f1 in ((1, 0.5), (5, 0.75))]
    made = chart("F1", journal(figures, evaluations))
    assert [(one.path, one.mean_path, one.dots, one.num_missing, one.latest) for one in made.strokes] == [
        ("M248.0 12.0L448.0 106.0", "", ((48.0, 153.0),), 1, "0.500"),
        ("M48.0 106.0L448.0 59.0", "", ((48.0, 106.0), (448.0, 59.0)), 0, "0.750"),
    ]
    validation = {"label": "validation", "y": [106.0, None, None, 59.0], "text": ["0.500", None, None, "0.750"]}
    assert made.hover["lines"][1] == validation
    assert (made.hover["steps"], made.hover["x"]) == ([1, 2, 3, 5], [48.0, 148.0, 248.0, 448.0])


@pytest.mark.parametrize(
    ("num_steps", "window", "is_smoothed", "num_drawn"),
    [(39, 5, False, 39), (40, 5, True, 40), (240, 13, True, 240), (241, 13, True, 240)],
)
def test_long_curves_are_smoothed_and_thinned_out(num_steps, window, is_smoothed, num_drawn):
    made = chart("F1", journal([(step, {"f1": step / num_steps}) for step in range(1, num_steps + 1)]))
    (stroke,) = made.strokes
    assert (made.window, bool(stroke.mean_path)) == (window, is_smoothed)
    assert len(places(stroke.path)) == len(made.hover["steps"]) == num_drawn


def test_bars_of_phases_stand_on_each_other():
    made = make_phase_chart(history_of({"sync": 1.0, "learn": 2.0}, {"rollout": 4.0}, step_s=5.0))
    assert {row.phase: row.path for row in made.rows if row.path} == {
        "sync": "M128.0 200.0V162.4h40.00V200.0z",
        "rollout": "M328.0 200.0V49.6h40.00V200.0z",
        "learn": "M128.0 162.4V87.2h40.00V162.4z",
        "other": "M128.0 87.2V12.0h40.00V87.2zM328.0 49.6V12.0h40.00V49.6z",
    }
    assert (made.hover["steps"], made.hover["x"]) == ([1, 2], [148.0, 348.0])


seconds = st.one_of(st.floats(0, 1e6), st.just(float("nan")), st.none())
timing = st.fixed_dictionaries({}, optional=dict.fromkeys(PHASES[:-1], seconds))


def history_of(*timings, step_s=None):
    return make_history(
        {"event": "step", "step": number, "phase_s": phase_s, "step_s": step_s}
        for number, phase_s in enumerate(timings, start=1)
    )


def boxes(path):
    """(left, bottom, top, width) of each bar of a phase."""
    found = re.findall(r"M(\S+) (\S+)V(\S+)h(\S+)V(\S+)z", path)
    return [tuple(float(number) for number in (left, bottom, top, width)) for left, bottom, top, width, _ in found]


@given(st.lists(timing, max_size=40))
def test_bars_stand_inside_the_frame(timings):
    chart = make_phase_chart(history_of(*timings))
    for row in chart.rows if chart else ():
        assert "nan" not in row.path
        for left, bottom, top, width in boxes(row.path):
            assert LEFT <= left < left + width <= RIGHT + 0.01
            assert TOP <= top < bottom <= BOTTOM


def test_totals_shares_and_the_rest_are_the_journals():
    chart = make_phase_chart(history_of({"rollout": 1.0, "learn": 2.5}, {"rollout": 2.0, "learn": 2.5}, step_s=5.0))
    table = {row.phase: (row.per_step, row.total, row.share) for row in chart.rows}
    assert table["rollout"] == ("1.50", "3.0 s", 0.3)
    assert table["learn"] == ("2.50", "5.0 s", 0.5)
    assert table["other"] == ("1.00", "2.0 s", 0.2)
    assert table["sync"] == ("0.00", "0.0 s", 0.0)
    assert (chart.total, chart.per_step) == ("10.0 s", "5.00")


def test_a_clock_that_went_backwards_takes_no_time():
    for phase_s, step_s, expected in (
        ({"sync": 3.0, "learn": -1.0}, 2.0, (3.0, 0.0)),
        ({"sync": 3.0}, 4.0, (3.0, 1.0)),
    ):
        made = make_phase_chart(history_of(phase_s, step_s=step_s))
        shares = {row.phase: row.share for row in made.rows}
        assert (shares["sync"], shares.get("other", 0.0)) == tuple(each / sum(expected) for each in expected)


def test_long_runs_share_bars_and_keep_their_totals():
    chart = make_phase_chart(history_of(*[{"learn": 2.0}] * 500))
    assert chart.per_step == "2.00"
    learn = next(row for row in chart.rows if row.phase == "learn")
    assert chart.steps_per_bar == 6
    assert len(boxes(learn.path)) == 84
    assert chart.hover["steps"][:2] == ["1-6", "7-12"]
    assert chart.hover["lines"][PHASES.index("learn")]["text"][0] == "2.00 s"
    assert chart.total == "16 min 40 s"
    mixed = make_phase_chart(history_of(*[{"learn": 2.0}, {"learn": 1.0}] * 50))
    assert mixed.hover["lines"][PHASES.index("learn")]["text"][0] == "1.50 s"
    for num_steps, each in ((90, 1), (91, 2)):
        assert make_phase_chart(history_of(*[{"learn": 2.0}] * num_steps)).steps_per_bar == each


@pytest.mark.parametrize("phase_s", [None, {}, "slow", {"learn": float("nan")}, {"learn": -1.0}])
def test_a_run_without_timing_has_no_chart(phase_s):
    assert make_phase_chart(history_of(phase_s)) is None
    assert make_phase_chart(history_of({"learn": 0.1})) is not None
