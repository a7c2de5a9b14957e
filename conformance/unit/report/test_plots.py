"""What each curve shows of a journal: steps or evaluations, up to which value, in which unit."""

from conformance.doubles.runs import START_S
from rollmatch.report import compare, curves
from rollmatch.report.history import make_history

STEP = {
    "loss": 2.0, "loss_ce": 1.5, "loss_coord": 0.5, "f1": 0.125, "reward": 0.25, "kl": 0.002, "clip_share": 0.012,
    "flat_group_rate": 0.034, "drift": 0.00421, "mean_iou": 0.375, "invalid_rate": 0.01, "truncated_rate": 0.02,
    "fill": 0.5, "rollout_tok_s": 2310.0, "grad_norm": 7.0,
}  # fmt: skip
HELD_OUT = {"f1": 0.625, "reward": 0.75, "mean_iou": 0.525}
HISTORY = make_history(
    [
        {"event": "step", "time": START_S, "step": 1, **STEP},
        {"event": "evaluated", "time": START_S, "step": 1, "metrics": HELD_OUT},
    ]
)


def shown(chart):
    """(latest text of each line, label of the highest tick)."""
    return [stroke.latest for stroke in chart.strokes], chart.y.ticks[-1].label


def test_the_curves_of_a_run():
    assert {chart.title: shown(chart) for chart in curves.make_charts(HISTORY)} == {
        "Loss": (["2.000", "1.500", "0.500"], "2"),
        "F1": (["0.125", "0.625"], "1"),
        "Reward": (["0.250", "0.750"], "0.8"),
        "Distance to the policy before training (k3)": (["0.002"], "0.002"),
        "Clipped tokens, and groups that teach nothing": (["1.2%", "3.4%"], "5%"),
        "Engine and learner apart, mean |log-probability|": (["0.00421"], "0.005"),
        "Mean IoU of matches": (["0.375", "0.525"], "1"),
        "Invalid and truncated responses": (["1.0%", "2.0%"], "5%"),
        "Packing fill": (["50.0%"], "100%"),
        "Rollout speed, tokens per second": (["2.31k"], "2.5k"),
        "Gradient norm": (["7"], "8"),
    }


def test_the_curves_of_a_comparison():
    found = {
        plot.title: shown(curves.draw(plot, [series]))
        for plot in compare.PLOTS
        if any((series := curves.read_series(plot.lines[0], HISTORY)).values)
    }
    assert found == {
        "F1 on held-out samples": (["0.625"], "1"),
        "Reward on held-out samples": (["0.750"], "0.8"),
        "Mean IoU on held-out samples": (["0.525"], "1"),
        "Loss": (["2.000"], "2"),
        "Invalid responses": (["1.0%"], "1%"),
        "Rollout speed, tokens per second": (["2.31k"], "2.5k"),
    }
