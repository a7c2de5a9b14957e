"""Rewards: anybody's functions, named, weighted, timed; advantages: about the group, whatever the rewards' level."""

import asyncio
import math
import multiprocessing
import os
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.refusals import refused
from conformance.doubles.reward_cases import CHATS, SAMPLES, TEXTS, judge, right, trl_async, verifiers_individual
from rollmatch.objectives.grpo.reward import CallLimits, Reward, judge_all, load_rewards_of


@pytest.mark.parametrize(
    "failing", [lambda a, s: 1 / 0, lambda a, s: math.nan, lambda a, s: None, lambda a: 1.0, lambda a, s: sys.exit(3)]
)
def test_a_function_that_fails_for_one_answer_costs_that_answer_only(failing):
    def sometimes(answer, sample):
        return failing(answer, sample) if sample.sample_id == 1 else 1.0

    judged = judge(["4", "5", "6"], Reward.of(sometimes))
    assert [each.total for each in judged] == [1.0, None, 1.0]
    assert [len(each.failures) for each in judged] == [0, 1, 0]
    assert judged[1].failures[0].startswith("sometimes on x:1: ")


def test_functions_that_always_fail_stop_the_run():
    with refused("rewards-all-failed", "x:0", problem="ZeroDivisionError"):
        judge(["4", "5", "6"], Reward.of(lambda answer, sample: 1 / 0))
    judge(["4", "5", "6"], Reward.of(right))


@pytest.mark.parametrize(
    "name", ["math", ":isqrt", "math:", "no_such_module:f", "math:no_such", "math:pi", "./mine.py:f"]
)
def test_a_name_that_is_no_function_is_refused(name):
    with refused("reward-unknown", "k"):
        load_rewards_of(name, key="k", shown="it", weight=1.0)


def test_modules_of_the_working_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_of_this_test.py").write_text("def one(answer, sample): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere", *__import__("sys").path])
    [one] = load_rewards_of("my_rewards_of_this_test:one", key="k", shown="it", weight=1.0)
    assert one.call(["a"], SAMPLES[:1]) == [1.0]


def trl_text(completions, prompts, answer, **columns):
    assert (prompts, columns["level"]) == (["2+2?", "2+3?"], [1, None])
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def trl_chat(completions, answer, **_):
    return [None if chat[0]["content"] == "?" else 1.0 for chat in completions]


async def verifiers_async(state, **others):
    assert state["completion"] == others["completion"]
    return 2.0


@pytest.mark.scenario(
    "grpo-server-mode/a-reward-function-of-trl-gets-all-completions-at-once",
    clauses=["grpo-server-mode/rewards-may-be-functions-of-other-libraries#1"],
)
@pytest.mark.parametrize(
    ("function", "samples", "form", "totals"),
    [
        (trl_text, TEXTS, "trl", [1.0, 0.0]),
        (trl_chat, CHATS, "trl", [1.0, None]),
        (trl_async, CHATS, "trl", [0.5, 0.5]),
        (verifiers_individual, CHATS, "verifiers", [1.0, 0.0]),
        (verifiers_async, CHATS, "verifiers", [2.0, 2.0]),
    ],
)
def test_functions_of_others_are_called_as_they_call_them(function, samples, form, totals):
    reward = Reward.of(function)
    assert reward.call.form == form
    assert [each.total for each in judge_all(["4", "?"], samples, [reward])] == totals


def test_a_function_that_says_nothing_leaves_the_sum_to_the_others():
    rewards = [Reward.of(trl_chat), Reward.of(trl_async, weight=2.0)]
    judged = judge_all(["4", "?"], CHATS, rewards)
    assert [(each.values, each.total) for each in judged] == [((1.0, 0.5), 2.0), ((None, 0.5), 1.0)]


def load(name, **fields):
    return load_rewards_of(f"{__name__}:{name}", key="k", shown=name, weight=2.0, limits=CallLimits(**fields))


@pytest.mark.scenario("grpo-server-mode/a-rubric-of-verifiers-is-a-reward-per-function")
def test_every_function_of_a_rubric_is_a_reward():
    rewards = load("RUBRIC")
    assert [(reward.name, reward.weight) for reward in rewards] == [("verifiers_individual", 2.0), ("trl_async", 1.0)]
    judged = judge_all(["4", "?"], CHATS, rewards)
    assert [each.total for each in judged] == [4.5, 2.5]


RUBRIC = SimpleNamespace(
    funcs=[verifiers_individual, trl_async], weights=[1.0, 0.5], class_objects={"parser": object()}
)


loops = []


async def remembers(answer, sample):
    loops.append(asyncio.get_running_loop())
    return 1.0


def test_a_client_of_a_judge_model_is_used_again_in_the_next_step():
    """An HTTP client that is made once keeps connections of the event loop that it was first used in."""
    for _ in range(2):
        judge(["a", "b", "c"], Reward.of(remembers))
    assert len(loops) == 6
    assert len(set(loops)) == 1
    assert not loops[0].is_closed()


async def slow(answer, sample):
    await asyncio.sleep(sample.sample_id)
    return 1.0


def test_a_call_that_takes_too_long_costs_its_completion_only():
    judged = judge_all(["4", "?"], CHATS, load("slow", timeout_s=0.05))
    assert [each.total for each in judged] == [2.0, None]
    with refused("reward-timeout", "k"):
        load("trl_text", timeout_s=1.0)
    with refused("reward-processes", "k"):
        load("slow", processes=1)


def in_a_worker(answer, sample):
    """What a worker returns, or how it fails."""
    if answer == "hang":
        threading.Event().wait()
    if answer == "crash":
        os._exit(3)
    return float(multiprocessing.parent_process() is not None)


@pytest.mark.scenario(
    "grpo-server-mode/a-reward-in-worker-processes-may-hang-or-crash",
    clauses=["grpo-server-mode/rewards-may-be-functions-of-other-libraries#3"],
)
def test_a_call_that_hangs_or_crashes_in_a_worker_costs_its_completion_only():
    rewards, samples = load("in_a_worker", timeout_s=5.0, processes=2), SAMPLES[:1] * 4
    judged = judge_all(["a", "hang", "crash", "b"], samples, rewards)
    assert [each.total for each in judged] == [2.0, None, None, 2.0]
    assert ["reward-timeout" in judged[1].failures[0], "ProcessExpired" in judged[2].failures[0]] == [True, True]
    assert [each.total for each in judge_all(["c"] * 4, samples, rewards)] == [2.0] * 4
    [batched] = load("trl_text", processes=1)
    assert batched.call(["4", "?"], TEXTS) == [1.0, 0.0]


def three(answer, sample, other):
    return 1.0


@pytest.mark.scenario(
    "grpo-server-mode/a-reward-function-of-no-known-form-is-refused",
    clauses=["grpo-server-mode/rewards-may-be-functions-of-other-libraries#2"],
)
def test_a_signature_of_no_form_is_refused():
    with refused("reward-signature", "k"):
        load("three")


@given(st.lists(st.text(max_size=3), min_size=1, max_size=5))
def test_every_form_rewards_every_completion_in_order(answers):
    samples = [replace(TEXTS[0], sample_id=place) for place in range(len(answers))]
    forms = (
        lambda answer, sample: len(answer),
        lambda completions: [len(text) for text in completions],
        lambda completion: len(completion),
    )
    for function in forms:
        judged = judge_all(answers, samples, [Reward.of(function)])
        assert [each.total for each in judged] == [len(answer) for answer in answers]
