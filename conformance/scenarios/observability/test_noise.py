"""A change is called one where other samples would show it, too."""

import json

import numpy as np
import pytest
from scipy import stats

from conformance.doubles.page_outline import visible
from conformance.doubles.runs import run_event, step_events, write_journal
from rollmatch.report import write_page
from rollmatch.report.evaluations import Evaluation
from rollmatch.report.noise import noise_between
from rollmatch.report.verdict import compare

RNG = np.random.default_rng(7)


def evaluation(parts, *, name="reward", **more):
    fields = {"sample_ids": tuple(range(len(parts))), "precision": "float32"} | more
    return Evaluation(step=0, scenes=(), parts={name: parts}, **fields)


def means(values, **more):
    return evaluation(tuple((float(value), 1.0) for value in values), **more)


@pytest.mark.parametrize("num", [6, 12, 200])
def test_the_interval_of_a_mean_is_that_of_the_paired_t_test(num):
    before, after = RNG.normal(size=num), RNG.normal(size=num)
    found = noise_between(means(before), means(after))["reward"]
    low, high = stats.ttest_rel(after, before).confidence_interval(0.95)
    assert found == pytest.approx((high - low) / 2, rel=0.01)
    turned = means(after[::-1], sample_ids=tuple(range(num))[::-1])
    assert noise_between(means(before), turned)["reward"] == pytest.approx(found), "samples are paired by their ids"


def test_the_interval_of_a_ratio_is_near_that_of_a_bootstrap():
    true, found = RNG.integers(1, 6, 80), RNG.integers(0, 6, 80)
    hits = [np.minimum(RNG.binomial(true, share), found) for share in (0.4, 0.6)]
    old, new = (np.stack([2 * hit, true + found], axis=1) for hit in hits)

    def change(places):
        return np.subtract(*(np.divide(*part[places].sum(axis=0)) for part in (new, old)))

    drawn = [change(RNG.integers(0, 80, 80)) for _ in range(4000)]
    halves = noise_between(evaluation(tuple(map(tuple, old)), name="f1"), evaluation(tuple(map(tuple, new)), name="f1"))
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert halves["f1"] == pytest.approx((high - low) / 2, rel=0.12)


@pytest.mark.parametrize(
    ("before", "after", "verdict", "text"),
    [
        ([0.0] * 12, [1.0] + [0.0] * 11, "unclear", "+0.083 ± 0.183"),
        ([0.0] * 12, [1.0] * 12, "better", "+1.000 ± 0.000"),
        ([0.0] * 5, [1.0] * 5, "unclear", "+1.000"),
        ([0.5] * 12, [0.5] * 12, "same", "+0.000 ± 0.000"),
        ([1.0] * 30, [0.0] * 10 + [1.0] * 20, "worse", "-0.333 ± 0.179"),
    ],
)
def test_one_of_twelve_samples_is_no_change(before, after, verdict, text):
    noise = noise_between(means(before), means(after))
    change = compare({"reward": np.mean(before)}, {"reward": np.mean(after)}, noise)[0]
    assert (change.verdict, change.delta_text) == (verdict, text)
    assert change.direction == {"better": 1, "worse": -1}.get(verdict, 0)


@pytest.mark.scenario(clauses=["observability/before-and-after-are-comparable#2"])
def test_other_precisions_and_other_samples_are_no_comparison():
    old, new = [0.0] * 12, [1.0] * 12
    assert noise_between(means(old), means(new, precision="bfloat16")) == {"reward": float("inf")}
    elsewhere = Evaluation(step=1, scenes=(), sample_ids=tuple(range(20, 32)), parts=means(new).parts)
    assert noise_between(means(old), elsewhere) == {"reward": float("inf")}


@pytest.mark.scenario(
    "observability/one-more-right-answer-of-twelve", clauses=["observability/before-and-after-are-comparable#3"]
)
def test_the_page_names_samples_and_precision_and_draws_no_arrow_for_noise(tmp_path):
    events = [run_event(max_steps=1), *step_events(1, of=1)]
    for step, hits in ((0, 0), (1, 1)):
        file = f"evaluations/step-{step:06d}.json"
        metrics = {"reward": hits / 12, "num_scenes": 12.0}
        parts = [[1.0, 1.0]] * hits + [[0.0, 1.0]] * (12 - hits)
        record = {"step": step, "scenes": [], "sample_ids": list(range(12)), "parts": {"reward": parts}}
        record |= {"precision": "bfloat16", "metrics": metrics}
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(json.dumps(record))
        head = {"event": "evaluated", "time": 1.75e9, "rank": 0, "step": step, "file": file, "precision": "bfloat16"}
        events.append(head | {"metrics": metrics})
    text = visible(write_page(write_journal(tmp_path, events)).read_text())
    assert "12 samples, computed in bfloat16" in text
    assert "+0.083 ± 0.183" in text
    assert "Mean reward went from 0.000 to 0.083, which may be noise" in text
