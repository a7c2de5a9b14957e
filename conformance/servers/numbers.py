"""Bounds on numbers; needs no torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

TOLERANCE = 1e-3
"""Between log-probabilities of two engines in float32. Unit: nats."""
SEEN = 4 * TOLERANCE
"""A tensor shows if leaving it out of an update moves some log-probability that far. Unit: nats."""
ENGINE_NOISE = 0.03
"""Root mean square of a bfloat16 engine's error in a log-probability. Unit: nats."""
FALSE_ALARM = 1e-6
"""Chance that a correct server misses one check of sampling."""
EVERY_TENSOR = 3
"""The policy of which every tensor shows in some response."""


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Largest difference; infinite for another length or what is no number.

    >>> distance([-1.0, -2.0], [-1.0, -2.5]), distance([-1.0], [])
    (0.5, inf)
    """
    if len(one) != len(other) or not all(map(math.isfinite, [*one, *other])):
        return math.inf
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)


def off(rows: Sequence[Mapping[str, Any]], *, wanted: str = "gaps logprobs") -> str:
    """The first response whose ids are not the likeliest, or whose log-probabilities differ; empty for none.

    >>> off([{"gaps": [0.0, 0.7], "logprobs": [-1.0, -2.0], "expected": [-1.0, -2.0]}])
    'response 0: id 1 is not the likeliest, by 0.7 nats'
    >>> off([{"gaps": [0.0], "logprobs": [-2.0], "expected": [-1.0]}])
    'response 0: log-probability 0 is -2.0 instead of -1.0'
    """
    for place, row in enumerate(rows):
        for index, gap in enumerate(row["gaps"] if "gaps" in wanted else []):
            if not gap <= 2 * TOLERANCE:  # both engines may be off by a tolerance
                return f"response {place}: id {index} is not the likeliest, by {gap:g} nats"
        if "logprobs" in wanted and distance(row["logprobs"] or [], row["expected"]) > TOLERANCE:
            pairs = zip(row["logprobs"] or [], row["expected"], strict=False)
            for index, (came, expected) in enumerate(pairs):
                if not abs(came - expected) <= TOLERANCE:
                    return f"response {place}: log-probability {index} is {came} instead of {expected}"
            return f"response {place}: {len(row['logprobs'] or [])} log-probabilities of {len(row['expected'])} ids"
    return ""


def chance_at_most(cells: Sequence[tuple[float, int]]) -> float:
    """Upper bound on the chance that independent draws lie as far from a distribution as these do.

    ``cells``: (probability, times drawn), all of them. With n draws of k cells and D the Kullback-Leibler divergence of
    the drawn shares from the probabilities, P(D >= d) <= exp(-nd) (e n d / (k - 1))^(k - 1) for every n (Agrawal,
    Finite-sample concentration of the multinomial in relative entropy, 2020). Before that, nd is lowered by what an
    engine may be off by itself, ``ENGINE_NOISE`` nats in a log-probability.

    >>> chance_at_most([(0.5, 250), (0.5, 262)]), chance_at_most([(1.0, 511), (0.0, 1)])
    (1.0, 0.0)
    >>> chance_at_most([(0.5, 350), (0.5, 150)]) < 1e-15
    True
    """
    drawn = sum(count for _, count in cells)
    if any(count and not probability for probability, count in cells):
        return 0.0
    far = sum(count * math.log(count / (drawn * probability)) for probability, count in cells if count)
    far -= drawn * ENGINE_NOISE**2
    free = max(1, sum(probability > 0 for probability, _ in cells) - 1)
    return 1.0 if far <= free else math.exp(free * (1 + math.log(far / free)) - far)
