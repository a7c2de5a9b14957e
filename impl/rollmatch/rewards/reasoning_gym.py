"""Rewards for tasks of reasoning-gym, by their own scorers.

A sample's metadata is the task's entry::

    for entry in reasoning_gym.create_dataset("chain_sum", seed=7, size=2048):
        print(json.dumps({"prompt": entry["question"], "metadata": entry}))
"""

from functools import cache
from typing import Any

from rollmatch.records import Sample


def score(answer: str, sample: Sample) -> float:
    """The task's score of what stands in the last ``<answer>`` of a text, or of the whole text where there is none."""
    from reasoning_gym.utils import extract_answer

    entry = sample.metadata
    found = extract_answer(answer)
    judge = _judge_of(entry["metadata"]["source_dataset"])
    return float(judge(answer.strip() if found is None else found, entry))


@cache
def _judge_of(task: str) -> Any:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)
