"""What a completion is worth: plain functions of (answer, sample), named in the configuration. Needs no torch.

A reward function takes the answer's text and its ``Sample`` and gives a finite number::

    def num_lines(answer: str, sample: Sample) -> float:
        return float(len(answer.splitlines()))
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollmatch.errors import ConfigError, TargetError
from rollmatch.objectives.named import load_named
from rollmatch.records import Sample

RewardFunction = Callable[[str, Sample], float]
"""``function(answer, sample)``: a finite number; an exception excludes the completion from the loss."""


class RewardUnknown(ConfigError):
    """A reward is named as module:function, and can be imported."""

    code = "reward-unknown"


class RewardsAllFailed(TargetError):
    """Some completion of a window could be judged."""

    code = "rewards-all-failed"


class RewardNotFinite(TargetError):
    """A reward function gives a finite number."""

    code = "reward-not-finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One function and what it counts."""

    name: str
    function: RewardFunction
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one completion got. Made by ``judge``."""

    values: tuple[float | None, ...]
    """Of each reward function; None where it failed."""
    total: float | None
    """Weighted sum; None where a function failed: the completion is left out."""
    failures: tuple[str, ...] = ()


@dataclass(slots=True)
class Timing:
    """Seconds that each reward function has taken."""

    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        """Add to a function's time."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def load_function(name: str, *, key: str) -> RewardFunction:
    """Import ``module:function``; modules of the working directory are found, too. Errors: ``RewardUnknown``.

    >>> load_function("math:isqrt", key="x")(17)
    4
    """
    found = load_named(name, key=key, kind="function", refuse=RewardUnknown)
    if not callable(found):
        raise RewardUnknown(f"{name} is no function", key=key, remedy="Name a function of (answer, sample).")
    function: RewardFunction = found
    return function


def judge_all(
    answers: Sequence[str], samples: Sequence[Sample], rewards: Sequence[Reward], timing: Timing
) -> list[Judgement]:
    """Every answer by every function. Errors: ``RewardsAllFailed``; one that fails for one answer costs only that."""
    judged = [_judge(answer, sample, rewards, timing) for answer, sample in zip(answers, samples, strict=True)]
    if judged and all(each.total is None for each in judged):
        raise RewardsAllFailed(
            f"all {len(judged)} completions: {judged[0].failures[0]}",
            key=samples[0].origin,
            remedy="Correct the reward function; it is called with the answer's text and its sample.",
        )
    return judged


def _judge(answer: str, sample: Sample, rewards: Sequence[Reward], timing: Timing) -> Judgement:
    values: list[float | None] = []
    failures = []
    for reward in rewards:
        began = time.perf_counter()
        try:
            values.append(_finite(reward.function(answer, sample), reward.name))
        except Exception as error:  # noqa: BLE001  # the user's code may raise anything; it costs this answer only
            values.append(None)
            failures.append(f"{reward.name} on {sample.origin}: {type(error).__name__}: {error}")
        timing.add(reward.name, time.perf_counter() - began)
    known = [value for value in values if value is not None]
    total = None
    if len(known) == len(values):
        total = math.fsum(reward.weight * value for reward, value in zip(rewards, known, strict=True))
    return Judgement(values=tuple(values), total=total, failures=tuple(failures))


def _finite(value: float, name: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise RewardNotFinite(f"is {number}", key=name)
    return number
