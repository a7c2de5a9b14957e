"""Values before steps -> advantages of steps -> advantages of tokens, normalised over the whole batch."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt
from typing import Literal

from rollmatch.environments.trajectory import Cuts

SumOverRanks = Callable[[Sequence[float]], list[float]]
Normalization = Literal["whiten", "scale", "none"]
_NEGLIGIBLE = 1e-8


def step_advantages(values: Sequence[float], rewards: Sequence[float]) -> tuple[float, ...]:
    """[S] values before each step and [S] rewards -> [S] reward + value after - value before.

    The end of a response has the value 0, so the sum telescopes to the return minus the value of the prompt.

    >>> [round(advantage, 6) for advantage in step_advantages((0.5, 0.5, 0.9), (0, 0, 1))]
    [0.0, 0.4, 0.1]
    """
    after = (*values[1:], 0.0)
    return tuple(reward + then - now for reward, then, now in zip(rewards, after, values, strict=True))


def spread(advantages: Sequence[float], cuts: Cuts) -> tuple[float, ...]:
    """[S] advantages of steps -> [R] advantages of their tokens.

    >>> spread((0.4, 0.1), (0, 3, 5))
    (0.4, 0.4, 0.4, 0.1, 0.1)
    """
    spans = zip(advantages, pairwise(cuts), strict=True)
    return tuple(advantage for advantage, (start, stop) in spans for _ in range(stop - start))


def normalize(
    batch: Sequence[Sequence[float]],
    written: Sequence[Sequence[bool]],
    how: Normalization,
    sum_over_ranks: SumOverRanks,
) -> list[tuple[float, ...]]:
    """Token advantages of a batch -> the same, normalised over the policy's tokens of all responses of all ranks.

    ``whiten`` takes the mean off and divides by the standard deviation (n - 1); ``scale`` divides by the root of the
    mean square and takes nothing off, so that a step which changes nothing stays at exactly 0. A batch whose
    advantages are all equal teaches nothing either way; ids of an environment get 0.

    >>> normalize([(1.0, 3.0)], [(True, True)], "scale", list)
    [(0.4472135954999579, 1.3416407864998738)]
    >>> normalize([(1.0, 3.0), (5.0,)], [(True, True), (False,)], "whiten", list)
    [(-0.7071067811865475, 0.7071067811865475), (0.0,)]
    """
    rows = [tuple(zip(*pair, strict=True)) for pair in zip(batch, written, strict=True)]
    kept = [a for row in rows for a, mine in row if mine]
    mean, factor = (0.0, 1.0) if how == "none" else _mean_and_factor(kept, how, sum_over_ranks)
    return [tuple((a - mean) * factor if mine else 0.0 for a, mine in row) for row in rows]


def _mean_and_factor(kept: Sequence[float], how: Normalization, sum_over_ranks: SumOverRanks) -> tuple[float, float]:
    """What is taken off each number, and what it is multiplied by then."""
    num, total = sum_over_ranks([float(len(kept)), sum(kept)])
    mean = total / num if how == "whiten" and num else 0.0
    (squares,) = sum_over_ranks([sum((a - mean) ** 2 for a in kept)])
    free = max(num - (1.0 if how == "whiten" else 0.0), 1.0)
    scale = sqrt(squares / free)
    return mean, 1.0 / scale if scale > _NEGLIGIBLE else 0.0
