"""Bounds on numbers; needs no torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from conformance.judge.servers.exchange import Exchange

TOLERANCE = 1e-3
"""Between log-probabilities of two engines in float32 on a CPU; what ``--tolerance`` replaces. Unit: nats."""
SMALL = 0.5
"""Up to this difference a miss may be rounding: its reason names the tolerance that passes; without a model, none is
missed. A logit of 32 to 64 has steps of 0.25 in bfloat16. Unit: nats."""
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


def seen(tolerance: float) -> float:
    """How far log-probabilities must move together, for what moved them to be seen. Unit: nats.

    The root of the sum of their squares. An engine's errors, each at most a tolerance, hardly ever add up to half of it
    in one direction.
    """
    return 4 * tolerance


def tolerance_of(exchange: Exchange) -> float:
    """That of the run; recordings of an earlier day lack it. Unit: nats."""
    return float(exchange.notes.get("tolerance", TOLERANCE))


def needed(rows: Sequence[Mapping[str, Any]], *, wanted: str = "gaps logprobs") -> float:
    """The least tolerance with which ``off`` finds nothing.

    >>> needed([{"gaps": [0.0, 0.5], "logprobs": [-1.0, -2.0], "expected": [-1.0, -2.125]}])
    0.25
    """
    gaps = [gap / 2 for row in rows for gap in (row["gaps"] if "gaps" in wanted else [])]
    far = [distance(row["logprobs"] or [], row["expected"]) for row in rows if "logprobs" in wanted]
    return max([*gaps, *far], default=0.0)


def remedy(least: float, tolerance: float) -> str:
    """What to type where ``least``, the tolerance that would pass, is small; empty elsewhere.

    >>> remedy(0.00213, 0.001), remedy(0.0004, 0.001), remedy(0.7, 0.001)
    ('; it is small everywhere: --tolerance 0.0022 passes', '', '')
    """
    if not tolerance < least <= SMALL:
        return ""
    scale = 10.0 ** (1 - math.floor(math.log10(least)))
    return f"; it is small everywhere: --tolerance {math.ceil(least * scale) / scale:g} passes"


def off(rows: Sequence[Mapping[str, Any]], *, wanted: str = "gaps logprobs", tolerance: float = TOLERANCE) -> str:
    """The first response whose ids are not the likeliest, or whose log-probabilities differ; empty for none.

    >>> off([{"gaps": [0.0, 0.7], "logprobs": [-1.0, -2.0], "expected": [-1.0, -2.0]}])
    'response 0: id 1 is not the likeliest, by 0.7 nats'
    >>> off([{"gaps": [0.0], "logprobs": [-2.0], "expected": [-1.0]}])
    'response 0: log-probability 0 is -2.0 instead of -1.0'
    """
    for place, row in enumerate(rows):
        for index, gap in enumerate(row["gaps"] if "gaps" in wanted else []):
            if not gap <= 2 * tolerance:  # both engines may be off by a tolerance
                return f"response {place}: id {index} is not the likeliest, by {gap:g} nats"
        if "logprobs" in wanted and distance(row["logprobs"] or [], row["expected"]) > tolerance:
            pairs = zip(row["logprobs"] or [], row["expected"], strict=False)
            for index, (came, expected) in enumerate(pairs):
                if not abs(came - expected) <= tolerance:
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
