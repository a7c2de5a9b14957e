"""The verdict in words."""

import pytest

from conformance.report.runs import evaluated_event, run_event, step_events
from rollmatch.report.history import make_history
from rollmatch.report.verdict import make_verdict

FINISHED = {"event": "finished", "rank": 0, "step": 60}


def verdict(*events):
    return make_verdict(make_history([run_event(), *events]))


@pytest.mark.parametrize(
    ("before", "after", "headline"),
    [
        ((0.1, 0.4), (0.8, 0.0), "F1 rose from 0.100 to 0.800 in 60 steps. Invalid responses fell from 40.0% to 0.0%."),
        ((0.8, 0.0), (0.1, 0.4), "F1 fell from 0.800 to 0.100 in 60 steps. Invalid responses rose from 0.0% to 40.0%."),
        ((0.5, 0.1), (0.5, 0.1), "F1 stayed at 0.500 in 60 steps."),
        ((0.5, 0.1), (float("nan"), 0.1), "F1 went from 0.500 to - in 60 steps."),
    ],
)
def test_before_and_after_are_told_in_words(before, after, headline):
    evaluations = [
        evaluated_event(step, f1=f1, invalid_rate=invalid) for step, (f1, invalid) in ((0, before), (60, after))
    ]
    assert verdict(*evaluations).headline == headline


def test_one_step_is_no_steps():
    assert " in 1 step." in verdict(evaluated_event(0), evaluated_event(1)).headline


def test_missing_evaluations_are_told():
    assert verdict().headline == "No step and no evaluation yet."
    assert verdict(*step_events(1)).headline == "Not evaluated yet."
    only = verdict(evaluated_event(0, f1=0.25))
    assert only.headline == "F1 was 0.250 at step 0; the evaluation to compare with is still to come."
    assert (only.before_step, only.after_step) == (0, None)


@pytest.mark.parametrize(
    ("ending", "status", "text"),
    [
        ([FINISHED], "finished", "finished: 2 of 60 steps"),
        ([{"event": "interrupted", "signal": "SIGTERM"}], "interrupted", "interrupted by SIGTERM: 2 of 60 steps"),
        ([{"event": "interrupted", "signal": 15}], "interrupted", "interrupted by SIGTERM: 2 of 60 steps"),
        ([], "unfinished", "unfinished: 2 of 60 steps so far"),
    ],
)
def test_the_status_says_how_far_the_run_came(ending, status, text):
    one = verdict(*step_events(1), *step_events(2), *ending)
    assert (one.status, one.status_text) == (status, text)


def test_restarts_and_lost_steps_are_told():
    one = verdict(*step_events(1), *step_events(2), run_event(resumed_from=1))
    assert one.notices == (
        "Started 2 times, last from step 1.",
        "1 step undone by a restart, not counted here.",
    )
    assert verdict(*step_events(1)).notices == ()
