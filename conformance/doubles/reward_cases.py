"""Samples with answers, and reward functions in the forms that TRL and verifiers know."""

import asyncio
from dataclasses import replace

from rollmatch.objectives.grpo.reward import judge_all
from rollmatch.records import Sample

SAMPLES = [
    Sample(sample_id=place, origin=f"x:{place}", images=(), metadata={"answer": answer})
    for place, answer in enumerate(["4", "5", "6"])
]


def right(answer, sample):
    return float(answer == sample.metadata["answer"])


def judge(answers, *rewards):
    return judge_all(answers, SAMPLES, rewards)


CHATS = [
    Sample(sample_id=0, origin="x:0", images=(), messages=(("user", "2+2?"),), metadata={"answer": "4", "level": 1}),
    Sample(sample_id=1, origin="x:1", images=(), messages=(("user", "2+3?"),), metadata={"answer": "5"}),
]
TEXTS = [replace(sample, has_text_prompt=True) for sample in CHATS]


async def trl_async(completions, **_):
    await asyncio.sleep(0)
    return [0.5] * len(completions)


def verifiers_individual(completion, answer, parser=None):
    return float(completion[-1]["content"] == answer) + (parser is not None)
