"""Curves: every drawn place is finite and inside the frame, every hover text is the journal's figure."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.report.runs import evaluated_event, step_events
from rollmatch.report.curves import BOTTOM, LEFT, MAX_POINTS, PLOTS, RIGHT, TOP, make_charts
from rollmatch.report.history import make_history

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


@settings(deadline=None)
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


def test_a_figure_stands_where_its_value_and_step_say():
    loss = chart("Loss", journal([(0, {"loss": 0.0}), (5, {"loss": 2.5}), (10, {"loss": 5.0})]))
    assert places(loss.strokes[0].path) == [(LEFT, BOTTOM), ((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2), (RIGHT, TOP)]


def test_hover_texts_are_the_journals_figures():
    events = [*step_events(1)[-1:], evaluated_event(1, f1=0.4321)]
    f1 = chart("F1", make_history([*events, {"event": "step", "step": 2, "f1": 0.75}]))
    assert f1.hover["steps"] == [1, 2]
    assert [line["text"] for line in f1.hover["lines"]] == [[f"{events[0]['f1']:.3f}", "0.750"], ["0.432", None]]


def test_a_gap_parts_the_line_and_is_told():
    history = journal([(number, {"loss": float("nan") if number == 3 else 1.0}) for number in range(1, 6)])
    (stroke,) = chart("Loss", history).strokes
    assert stroke.path.count("M") == 2
    assert stroke.num_missing == 1
    whole = chart("Loss", journal([(number, {"loss": 1.0}) for number in range(1, 6)])).strokes[0]
    assert (whole.path.count("M"), whole.num_missing) == (1, 0)


def test_a_single_step_is_a_dot():
    (stroke,) = chart("Loss", journal([(1, {"loss": 2.0})])).strokes
    assert (stroke.path, len(stroke.dots), stroke.latest) == ("", 1, "2.000")


def test_a_plot_without_any_finite_value_is_left_out():
    assert chart("Gradient norm", journal([(1, {"grad_norm": float("inf")}), (2, {})])) is None
    assert chart("Gradient norm", journal([(1, {"grad_norm": 1.0})])) is not None


@pytest.mark.parametrize(("num_steps", "smoothed"), [(39, False), (40, True), (500, True)])
def test_long_curves_are_thinned_and_smoothed(num_steps, smoothed):
    history = journal([(number, {"loss": (number * 37 % 101) / 10}) for number in range(1, num_steps + 1)])
    loss = chart("Loss", history)
    assert bool(loss.strokes[0].mean_path) is smoothed
    assert len(places(loss.strokes[0].path)) <= MAX_POINTS + 2
    assert len(loss.hover["steps"]) <= MAX_POINTS + 2
    assert min(y for _, y in places(loss.strokes[0].path)) == loss.y.place(max(e["loss"] for e in history.steps))
    assert loss.window % 2 == 1
