"""What the page and the console say of a run that learns from a teacher."""

import pytest

from conformance.doubles.runs import run_event
from rollmatch.report.console import step_line
from rollmatch.report.curves import make_charts
from rollmatch.report.history import make_history
from rollmatch.report.verdict import make_verdict

STEP = {"event": "step", "time": 1.0, "rank": 0, "step": 1, "loss": 0.1, "teacher_kl": 0.41, "divergence": 0.05}
STEP |= {"teacher_logprob": -1.5, "policy_logprob": -1.09, "teacher_agree": 0.625, "reward/right": 0.25}


def evaluated(step, teacher_logprob, **rewards):
    metrics = {"teacher_logprob": teacher_logprob, "truncated_rate": 0.0, "num_scenes": 8} | rewards
    return {"event": "evaluated", "time": float(step), "rank": 0, "step": step, "file": "none", "metrics": metrics}


@pytest.mark.scenario(
    "distillation/a-shortcut-is-named", clauses=["distillation/what-a-policy-has-of-its-teacher-is-shown#2"]
)
@pytest.mark.parametrize(
    ("after", "is_named"),
    [((-0.4, 0.2), True), ((-0.4, 0.3), True), ((-0.4, 0.5), False), ((-0.9, 0.2), False), ((-1.2, 0.2), False)],
)
def test_a_shortcut_is_named(after, is_named):
    for name in ("reward/right", "reward"):
        pair = evaluated(0, -0.9, **{name: 0.3}), evaluated(10, after[0], **{name: after[1]})
        verdict = make_verdict(make_history([run_event(), *pair]))
        assert any("shortcut" in notice for notice in verdict.notices) == is_named
    assert verdict.headline.startswith("Mean reward ")


def test_without_rewards_nothing_is_said_of_shortcuts():
    verdict = make_verdict(make_history([run_event(), evaluated(0, -0.9), evaluated(10, -0.4)]))
    assert verdict.notices == ()
    assert verdict.headline == "Log-probability by the teacher rose from -0.900 to -0.400 in 10 steps."


def test_the_figures_of_a_step_are_drawn_and_printed():
    charts = {chart.title: [stroke.latest for stroke in chart.strokes] for chart in make_charts(make_history([STEP]))}
    assert charts["Divergence from the teacher"] == ["0.050", "0.410"]
    assert charts["Mean log-probability of sampled tokens"] == ["-1.500", "-1.090"]
    assert charts["Tokens that are the teacher's likeliest"] == ["62.5%"]
    line = step_line(STEP, total_steps=10, with_phases=False).plain
    assert "right  0.250  divergence 0.050  kl 0.4100  agree  62.5%" in line
