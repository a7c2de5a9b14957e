"""Lines on the console: golden text without a terminal, a bar with one."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from conformance.doubles.runs import evaluated_event, run_event, step_events
from rollmatch.report.console import StepConsole, make_console, print_before_after, print_header, print_line, step_line
from rollmatch.report.verdict import compare


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


def ascii_stream():
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")


def step(number, **changes):
    return step_events(number)[-1] | changes


def test_without_a_terminal_every_step_is_one_plain_line(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with StepConsole(60, stream) as console:
        console.step(step(9))
        console.note("evaluated at step 9: f1 0.31 [saved]")
        console.step(step(10, loss=12.3456, f1=float("nan"), rollout_tok_s=12_345.6, phase_s={"learn": 123.4}))
        console.warn("truncated rate 12%")
    assert stream.getvalue() == (
        "step  9/60  loss 3.535  f1 0.23  iou 0.23  invalid  34.0%  cut   8.5%  fill 0.93  rollout  2,400 tok/s"
        "  sync  0.1 rollout  1.1 target  0.0 pack  0.0 learn  2.4 s  left 3 min 11 s\n"
        "evaluated at step 9: f1 0.31 [saved]\n"
        "step 10/60  loss 12.35  f1    -  iou 0.17  invalid  33.3%  cut   8.3%  fill 0.93  rollout 12,346 tok/s"
        "  sync    - rollout    - target    - pack    - learn  123 s  left 3 min 8 s\n"
        "warning: truncated rate 12%\n"
    )


@given(st.integers(1, 999), st.floats(0, 9_999), st.floats(0, 1), st.floats(0, 99_999), st.floats(0, 999))
def test_columns_stay_in_place(number, loss, share, speed, seconds):
    event = {"loss": loss, "f1": share, "invalid_rate": share, "fill": share, "rollout_tok_s": speed}
    line = step_line({"step": number, **event, "phase_s": {"learn": seconds}}, total_steps=999).plain
    empty = step_line({}, total_steps=999).plain
    assert len(line) == len(empty)
    for label in ("loss", "f1", "invalid", "fill", "rollout", "tok/s", "sync", "learn"):
        assert line.index(label) == empty.index(label)


def test_a_terminal_gets_a_bar_under_the_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    stream = Terminal()
    with StepConsole(60, stream) as console:
        console.step(step(41))
        (task,) = console._progress.tasks
        assert (task.completed, task.total) == (41, 60)
        assert sum(sample.completed for sample in task._progress) == 1, "steps of an earlier start count as speed"
        console.step(step(42))
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stream.getvalue())
    assert all(part in text for part in ("42/60", "left", "training", "step 42/60"))
    assert max(len(line) for line in re.split(r"[\r\n]+", text) if line.startswith("training")) == 110
    assert stream.getvalue().endswith("\x1b[1A\x1b[2K"), "the bar goes with the run"


def test_a_narrow_terminal_gets_the_short_line(monkeypatch):
    for columns, with_phases in ((110, False), (190, True)):
        monkeypatch.setenv("COLUMNS", str(columns))
        stream = Terminal()
        with StepConsole(60, stream) as console:
            console.step(step(1))
        assert ("learn" in stream.getvalue()) is with_phases


def test_the_bar_goes_even_when_the_run_fails():
    console = StepConsole(60, Terminal())
    with pytest.raises(KeyboardInterrupt), console:
        raise KeyboardInterrupt
    assert console._progress.finished is False
    assert not console._progress.live.is_started


def test_the_header_has_the_facts_of_the_run():
    stream = io.StringIO()
    print_header(run_event(resumed_from=12) | {"model": "/models/" + "deep/" * 40}, stream=stream)
    lines = stream.getvalue().splitlines()
    assert lines[:3] == [
        "rollmatch",
        f"  Model         /models/{'deep/' * 40}",
        "  Parameters    4.21M, 1.05M trained (25.0%)",
    ]
    assert "  Resumed from  step 12" in lines


def rows(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_final_table_has_changes_and_their_sense():
    stream = io.StringIO()
    before, after = evaluated_event(0)["metrics"], evaluated_event(60, mean_iou=0.4, recall=float("nan"))["metrics"]
    print_before_after(compare(before, after | {"precision": 0.2}), stream=stream)
    assert rows(stream.getvalue())[2:] == [
        "F1 0.120 0.820 +0.700 \u25b2 better",
        "F1, desc too 0.050 0.650 +0.600 \u25b2 better",
        "Precision 0.200 0.200 +0.000 same",
        "Recall 0.100 - -",
        "Mean IoU 0.550 0.400 -0.150 \u25bc worse",
        "Invalid 42.0% 0.0% -42.0 pp \u25bc better",
        "Malformed objects - - -",
        "Truncated 10.0% 0.0% -10.0 pp \u25bc better",
    ]
    assert "\x1b" not in stream.getvalue()


def test_names_and_figures_are_shown_as_they_are_and_columns_are_not_broken(monkeypatch):
    monkeypatch.setenv("COLUMNS", "47")
    stream = Terminal()
    figures = {"reward": 1.0, "reward/:smile: [red] 12": 0.5, "truncated_rate": 0.5}
    print_before_after(compare(figures, figures | {"reward": 2.0, "truncated_rate": 0.25}), stream=stream)
    print_line(Text(f":smile: 12{' more' * 20}"), make_console(stream))
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stream.getvalue()).splitlines()]
    assert lines[2] == "Reward      1.000   2.000     +1.000   \u25b2 better"
    assert lines[3:6] == ["Reward:     0.500   0.500     +0.000     same", ":smile:", "[red] 12"]
    assert lines[6] == "Truncat\u2026    50.0%   25.0%   -25.0 pp   \u25bc better"
    assert lines[-1] == f":smile: 12{' more' * 20}"


def test_an_ascii_stream_gets_ascii():
    stream = ascii_stream()
    print_before_after(compare({"f1": 0.25, "mean_iou": 0.5}, {"f1": 0.5, "mean_iou": 0.25}), stream=stream)
    print_header({"model": "modèle"}, stream=stream)
    with StepConsole(60, stream) as console:
        console.note("\u2192 done")
    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")
    assert "^ better" in text
    assert "v worse" in text
    assert "mod\\xe8le" in text
    assert "\\u2192 done" in text


def test_the_ages_of_old_rollouts_end_the_line():
    event = {"overlap": {"efficiency": 0.876}, "staleness": {"0": 4, "1": 3, "2": 1}}
    assert step_line(event, total_steps=9).plain.endswith("  efficiency 0.88  stale 3 by 1 1 by 2")
    assert "stale" not in step_line(event | {"staleness": {"0": 4}}, total_steps=9).plain


def test_a_step_that_generates_nothing_has_no_speed_of_it():
    event = {"step": 1, "loss": 1.0, "loss_ce": 1.0, "fill": 1.0, "rollout_tokens": 0.0, "rollout_tok_s": 0.0}
    event |= {"phase_s": {"sync": 0.0, "rollout": 0.0, "pack": 0.1, "learn": 2.5}, "overlap": {"efficiency": 1.0}}
    assert step_line(event, total_steps=2).plain.endswith("fill 1.00  pack  0.1 learn  2.5 s")
    assert "100 tok/s" in step_line(event | {"rollout_tokens": 9.0, "rollout_tok_s": 100.0}, total_steps=2).plain
