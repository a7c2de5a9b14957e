"""Rewards are anybody's functions: named, weighted, timed, and of no danger to the run."""

import math

import pytest

from rollmatch.objectives.grpo.reward import Reward, RewardsAllFailed, RewardUnknown, Timing, judge_all, load_function
from rollmatch.records import Sample

SAMPLES = [
    Sample(sample_id=place, origin=f"x:{place}", images=(), metadata={"answer": answer})
    for place, answer in enumerate(["4", "5", "6"])
]


def right(answer, sample):
    return float(answer == sample.metadata["answer"])


def length(answer, sample):
    return len(answer)


def judge(answers, *rewards):
    timing = Timing()
    return judge_all(answers, SAMPLES, rewards, timing), timing


def test_a_total_is_the_weighted_sum():
    judged, timing = judge(
        ["4", "77", "6"], Reward(name="right", function=right), Reward(name="length", function=length, weight=-0.5)
    )
    assert [each.values for each in judged] == [(1.0, 1.0), (0.0, 2.0), (1.0, 1.0)]
    assert [each.total for each in judged] == [0.5, -1.0, 0.5]
    assert set(timing.seconds) == {"right", "length"}
    assert all(seconds >= 0 for seconds in timing.seconds.values())


@pytest.mark.parametrize("failing", [lambda a, s: 1 / 0, lambda a, s: math.nan, lambda a, s: None, lambda a: 1.0])
def test_a_function_that_fails_for_one_answer_costs_that_answer_only(failing):
    def sometimes(answer, sample):
        return failing(answer, sample) if sample.sample_id == 1 else 1.0

    judged, _ = judge(["4", "5", "6"], Reward(name="sometimes", function=sometimes))
    assert [each.total for each in judged] == [1.0, None, 1.0]
    assert [len(each.failures) for each in judged] == [0, 1, 0]
    assert judged[1].failures[0].startswith("sometimes on x:1: ")


def test_functions_that_always_fail_stop_the_run():
    with pytest.raises(RewardsAllFailed) as caught:
        judge(["4", "5", "6"], Reward(name="broken", function=lambda answer, sample: 1 / 0))
    assert (caught.value.code, caught.value.key) == ("rewards-all-failed", "x:0")
    assert "ZeroDivisionError" in caught.value.problem
    judge(["4", "5", "6"], Reward(name="right", function=right))


@pytest.mark.parametrize("name", ["math", ":isqrt", "math:", "no_such_module:f", "math:no_such", "math:pi"])
def test_a_name_that_is_no_function_is_told(name):
    with pytest.raises(RewardUnknown) as caught:
        load_function(name, key="custom.extra.grpo.rewards.0.function")
    assert (caught.value.code, caught.value.key) == ("reward-unknown", "custom.extra.grpo.rewards.0.function")
    assert load_function("math:isqrt", key="x")(16) == 4


def test_modules_of_the_working_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_of_this_test.py").write_text("def one(answer, sample): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere", *__import__("sys").path])
    assert load_function("my_rewards_of_this_test:one", key="x")("a", SAMPLES[0]) == 1.0
