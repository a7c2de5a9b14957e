"""How much better a completion is than the others of its group. Needs no torch.

Sources: GRPO (arXiv 2402.03300), Dr. GRPO (2503.20783: ``scale`` none), RLOO (2402.14740: ``leave_one_out``).
"""

from collections.abc import Sequence
from math import fsum, sqrt
from typing import Literal

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["group", "batch", "none"]

STD_FLOOR = 1e-4
"""Added to a standard deviation before it divides."""


def group_advantages(
    groups: Sequence[Sequence[float | None]], *, baseline: Baseline = "mean", scale: Scale = "group"
) -> list[list[float]]:
    """Advantages of every group's rewards; a completion without a reward (None) is in no mean and has 0.

    ``mean`` compares with the whole group, ``leave_one_out`` with its other members. ``group`` divides by the group's
    sample standard deviation plus 1e-4, ``batch`` by that of all rewards. A group of equal rewards has 0 throughout.

    >>> group_advantages([[1, 0, 0, 1]], scale="none")
    [[0.5, -0.5, -0.5, 0.5]]
    >>> [[round(advantage, 4) for advantage in group] for group in group_advantages([[1, 0, 0, 1]])]
    [[0.8659, -0.8659, -0.8659, 0.8659]]
    >>> group_advantages([[3.0, 0.0, None]], baseline="leave_one_out", scale="none")
    [[3.0, -3.0, 0.0]]
    """
    whole = [reward for group in groups for reward in group if reward is not None]
    return [_advantages_of(group, baseline, scale, whole) for group in groups]


def is_flat(group: Sequence[float | None]) -> bool:
    """Whether a group's rewards are all alike, so that it teaches nothing."""
    known = [reward for reward in group if reward is not None]
    return all(reward == known[0] for reward in known)


def _advantages_of(
    group: Sequence[float | None], baseline: Baseline, scale: Scale, whole: Sequence[float]
) -> list[float]:
    known = [reward for reward in group if reward is not None]
    if len(known) < 2 or is_flat(group):
        return [0.0] * len(group)
    mean = fsum(known) / len(known)
    # r - mean of the others = (r - mean of all) * n / (n - 1)
    factor = len(known) / (len(known) - 1) if baseline == "leave_one_out" else 1.0
    divisor = 1.0 if scale == "none" else _std(known if scale == "group" else whole) + STD_FLOOR
    return [0.0 if reward is None else (reward - mean) * factor / divisor for reward in group]


def _std(values: Sequence[float]) -> float:
    """Sample standard deviation of two values or more."""
    mean = fsum(values) / len(values)
    return sqrt(fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
