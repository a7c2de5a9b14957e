"""How much a figure of two evaluations may differ by the choice of samples alone."""

import math
from collections.abc import Sequence

from scipy.special import stdtrit

from rollmatch.report.evaluations import Evaluation, Parts

CONFIDENCE = 0.95
LEAST_SAMPLES = 6
"""With fewer, even a figure that rises on every sample may do so by chance: 2 * 0.5**5 is more than 5 %."""


def noise_between(before: Evaluation, after: Evaluation) -> dict[str, float]:
    """Half the width of the 95 % interval of each figure's change, over the samples that both evaluations have.

    A figure is a ratio of sums over samples; the interval is that of its paired, linearized differences (Student's t).
    Infinite for less than six samples, and where the two were computed in other precisions. Empty for evaluations that
    keep no parts.
    """
    places = {sample_id: place for place, sample_id in enumerate(after.sample_ids)}
    both = [(place, places[one]) for place, one in enumerate(before.sample_ids) if one in places]
    is_comparable = len(both) >= LEAST_SAMPLES and before.precision == after.precision
    return {
        name: _half_width([before.parts[name][one] for one, _ in both], [after.parts[name][one] for _, one in both])
        if is_comparable
        else math.inf
        for name in before.parts.keys() & after.parts.keys()
    }


def _half_width(before: Sequence[Parts], after: Sequence[Parts]) -> float:
    """Of the change of sum(part) / sum(whole).

    >>> _half_width([(0.0, 1.0)] * 8, [(1.0, 1.0)] * 8)
    0.0
    >>> round(_half_width([(0.0, 1.0)] * 10, [(1.0, 1.0)] + [(0.0, 1.0)] * 9), 3)
    0.226
    """
    shares = [new - old for old, new in zip(_influences(before), _influences(after), strict=True)]
    num = len(shares)
    mean = math.fsum(shares) / num
    variance = math.fsum((share - mean) ** 2 for share in shares) / (num - 1)
    return float(stdtrit(num - 1, 0.5 + CONFIDENCE / 2)) * math.sqrt(variance / num)


def _influences(parts: Sequence[Parts]) -> list[float]:
    """What each sample adds to the ratio beyond its share: (part - ratio * whole) / mean(whole)."""
    whole = math.fsum(each for _, each in parts)
    if not whole:
        return [0.0] * len(parts)
    ratio = math.fsum(part for part, _ in parts) / whole
    return [(part - ratio * each) * len(parts) / whole for part, each in parts]
