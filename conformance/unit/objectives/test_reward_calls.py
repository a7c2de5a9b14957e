"""How reward functions are called: by their signatures, once or per completion, and what a call that fails costs."""

import asyncio
import math
from concurrent import futures
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conformance.doubles.refusals import refused
from conformance.doubles.reward_cases import CHATS, SAMPLES, TEXTS, judge, right, trl_async, verifiers_individual
from rollmatch.objectives.grpo.reward import Judgement, Reward, judge_all, load_rewards_of
from rollmatch.objectives.grpo.reward_calls import columns_of, form_of, state_of
from rollmatch.objectives.grpo.segments import make_reports


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda completions: [1.0], "[reward-count-wrong] returned 1 values for 2 completions"),
        (lambda completions: 1.0, "[reward-count-wrong] returned a float for 2 completions"),
        (lambda completions: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda completions: "ab", "[reward-count-wrong] returned a str for 2 completions"),
        (lambda completions: {1: 2, 3: 4}, "[reward-count-wrong] returned a dict for 2 completions"),
    ],
)
def test_a_call_for_all_that_fails_or_returns_another_number_fails_for_all(function, problem):
    with refused("rewards-all-failed", "x:0", problem=f"all 2 completions: <lambda> on x:0: {problem}"):
        judge_all(["4", "?"], CHATS, [Reward.of(function)])
    call = Reward.of(function).call
    assert len(set(map(id, call(["4", "?", "!"], CHATS[:1] * 3)))) == 1


@pytest.mark.parametrize("made", [np.array, torch.tensor, tuple, iter, lambda values: torch.tensor(values).bfloat16()])
def test_rewards_of_trl_come_in_anything_that_holds_numbers(made):
    def reward(completions, **_):
        return made([0.25, math.nan])  # TRL holds None as NaN

    judged = judge_all(["4", "?"], CHATS, [Reward.of(reward), Reward.of(lambda answer, sample: 1.0)])
    assert [one.values for one in judged] == [(0.25, 1.0), (None, 1.0)]
    assert [one.total for one in judged] == [1.25, 1.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: Reward.of(right).call(["4"], SAMPLES),
        lambda: columns_of(["4"], SAMPLES),
        lambda: judge(["4"]),
        lambda: make_reports([], [Judgement(values=(), total=1.0)], group_size=1),
        lambda: load_rewards_of(f"{__name__}:SHORT_RUBRIC", key="k", shown="it", weight=1.0),
    ],
)
def test_lists_of_other_lengths_are_not_paired(call):
    with pytest.raises(ValueError, match="zip"):
        call()


SHORT_RUBRIC = SimpleNamespace(funcs=[verifiers_individual, trl_async], weights=[1.0])


async def fails_or_is_cancelled(answer, sample):
    raise KeyError(answer) if answer == "fail" else asyncio.CancelledError


def test_a_failure_of_a_coroutine_costs_its_completion_and_its_end_from_outside_stops_all():
    call = Reward.of(fails_or_is_cancelled).call
    assert [type(value) for value in call(["fail"], CHATS[:1])] == [KeyError]
    with pytest.raises((asyncio.CancelledError, futures.CancelledError)):
        call(["fail", "cancel"], CHATS)


@pytest.mark.parametrize(
    ("function", "objects", "form"),
    [
        (lambda answer, sample, state=None: 1.0, (), "ours"),
        (lambda completion, other: 1.0, (), "ours"),
        (lambda completion, other: 1.0, ("other",), "verifiers"),
        (lambda answer, info: 1.0, (), "verifiers"),
        (lambda answer, task, **others: 1.0, (), "verifiers"),
        (lambda completions, completion_ids=None, log_extra=None: [], (), "trl"),
        (lambda completion_ids, **columns: [], (), "trl"),
        (lambda answer, sample, trainer_state=None: 1.0, (), "ours"),
    ],
)
def test_a_signature_decides_how_a_function_is_called(function, objects, form):
    assert form_of(function, "f", key="k", objects=objects) == form
    with refused("reward-signature", "k"):
        form_of(lambda answer: 1.0, "f", key="k", objects=objects)
    withheld = {"log_extra": "nobody reads it"}
    with refused("reward-signature", "k", problem="needs log_extra, and nobody reads it"):
        form_of(lambda completions, log_extra: [], "f", key="k", objects=objects, withheld=withheld)


def test_what_functions_of_others_can_ask_for():
    fields = {"prompt": "2+3?", "completion": "a", "answer": "5", "task": "default", "info": {}}
    instructed = replace(TEXTS[1], messages=(("system", "Add."), *TEXTS[1].messages))
    assert state_of("a", instructed) == fields | {"state": fields}
    chat = {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": "b"}]}
    given = {"task": "sums", "info": {"level": 2}}
    known = {name: value for name, value in state_of("b", replace(CHATS[0], metadata=given)).items() if name != "state"}
    assert known == chat | given | {"answer": ""}
    columns = columns_of(["a", "b"], [TEXTS[1], TEXTS[0]])
    assert (columns["prompts"], columns["completions"], columns["level"]) == (["2+3?", "2+2?"], ["a", "b"], [None, 1])
    named = replace(TEXTS[0], metadata={"completions": ["4"], "prompts": 1, "answers": ["four"]})
    columns_of_it = columns_of(["a"], [named])  # what was generated is judged, and not a column of that name
    assert (columns_of_it["completions"], columns_of_it["prompts"]) == (["a"], ["2+2?"])
    assert columns_of_it["answers"] == [["four"]]
    assert (columns["answers"], columns["answer"], columns["tasks"]) == (["5", "4"], ["5", "4"], ["default"] * 2)
