"""Rewards that ms-swift registers by a name."""

import re

from rollmatch.records import Sample

_FORMAT = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)


def format(answer: str, sample: Sample) -> float:  # ms-swift's name
    """1 for an answer of one thought and one answer, each in its tags, and nothing around them.

    >>> sample = Sample(sample_id=0, origin="x:1", images=())
    >>> format("<think>2 + 2</think> <answer>4</answer>", sample), format("<answer>4</answer>", sample)
    (1.0, 0.0)
    """
    return float(_FORMAT.fullmatch(answer) is not None)
