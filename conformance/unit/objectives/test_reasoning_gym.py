"""Tasks of an unmodified reasoning-gym, scored by their own scorers."""

from dataclasses import replace
from itertools import islice

import pytest
import reasoning_gym

from conformance.doubles.locks import sample_of
from rollmatch.objectives.grpo.reward import judge_all, load_rewards_of


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "spell_backward", "basic_arithmetic"])
def test_a_task_is_scored_as_its_own_scorer_does(task):
    rewards = load_rewards_of("rollmatch.rewards.reasoning_gym:score", key="k", shown="score", weight=1.0)
    dataset = reasoning_gym.create_dataset(task, seed=7, size=4)
    for number, entry in enumerate(islice(dataset, 4)):
        right, wrong = entry["answer"], "no answer"
        answers = [right, f"I think <answer>{right}</answer>", wrong, f"{right} <answer>{wrong}</answer>"]
        samples = [replace(sample_of(number), metadata=entry)] * 4
        judged = [one.total for one in judge_all(answers, samples, rewards)]
        assert judged == [dataset.score_answer(text, entry) for text in (right, right, wrong, wrong)]
        assert judged[0] == 1.0
