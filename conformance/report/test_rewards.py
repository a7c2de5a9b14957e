"""A run that learns from rewards is told by its rewards."""

from rollmatch.report.console import step_line
from rollmatch.report.curves import make_charts
from rollmatch.report.history import make_history
from rollmatch.report.verdict import compare, make_verdict

STEP = {"event": "step", "loss": 0.01, "reward": 0.5, "kl": 0.002, "clip_share": 0.01, "drift": 1e-4, "fill": 0.9}


def evaluated(step, reward):
    metrics = {"reward": reward, "reward/form": reward, "truncated_rate": 0.1, "reward_failed_rate": 0.0}
    return {"event": "evaluated", "step": step, "metrics": metrics}


def history():
    steps = [STEP | {"step": number, "reward": 0.1 * number} for number in (1, 2, 3)]
    return make_history([{"event": "run"}, evaluated(0, 0.25), *steps, evaluated(3, 0.5)])


def test_a_step_tells_reward_distance_clipping_and_drift():
    line = step_line(STEP | {"step": 3, "rollout_tok_s": 100.0}, total_steps=9, with_phases=False).plain
    assert "reward  0.500" in line
    assert "kl 0.0020" in line
    assert "clip   1.0%" in line
    assert "drift 0.0001" in line
    assert "f1" not in line


def test_before_and_after_are_compared_by_reward():
    changes = compare(evaluated(0, 0.25)["metrics"], evaluated(3, 0.5)["metrics"])
    labels = [change.measure.label for change in changes]
    assert labels == ["Reward", "Reward: form", "Truncated", "Not judged"]
    assert [change.verdict for change in changes] == ["better", "better", "same", "same"]


def test_the_headline_speaks_of_the_reward():
    assert make_verdict(history()).headline == "Mean reward rose from 0.250 to 0.500 in 3 steps."


def test_the_page_draws_what_is_there_and_nothing_else():
    titles = [chart.title for chart in make_charts(history())]
    assert titles == [
        "Loss",
        "Reward",
        "Distance to the policy before training (k3)",
        "Clipped tokens, and groups that teach nothing",
        "Engine and learner apart, mean |log-probability|",
        "Packing fill",
    ]
