"""What a completion is worth: functions and rubrics named in the configuration. Needs no torch.

A reward function takes the answer's text and its ``Sample`` and returns a finite number::

    def num_lines(answer: str, sample: Sample) -> float:
        return float(len(answer.splitlines()))

Functions in the forms of TRL and verifiers are called as these call them: ``reward_calls``.
"""

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from rollmatch.config.named import load_named
from rollmatch.environments.worker_processes import WorkerProcesses
from rollmatch.errors import ConfigError, RollmatchError, TargetError
from rollmatch.objectives.grpo.reward_calls import Notes, RewardCall, Value, form_of
from rollmatch.records import Sample

RewardFunction = Callable[[str, Sample], float]
"""``function(answer, sample)``: a finite number; an exception excludes the completion from the loss."""


class RewardUnknown(ConfigError):
    """A reward is not named as module:function, or cannot be imported."""

    code = "reward-unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One function and what it counts."""

    name: str
    call: RewardCall
    weight: float

    @classmethod
    def of(cls, function: Callable[..., object], *, name: str | None = None, weight: float = 1.0) -> "Reward":
        """A reward from a function in any of the forms. Errors: ``ConfigError`` with ``reward-signature``."""
        shown = name or str(getattr(function, "__name__", type(function).__name__))
        call = RewardCall(function=function, form=form_of(function, shown, key="rewards"))
        return cls(name=shown, call=call, weight=weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one completion got. Made by ``judge``."""

    values: tuple[float | None, ...]
    """Of each reward function; None where it failed, or says nothing about this completion."""
    total: float | None
    """Weighted sum; None where a function failed: the completion is left out."""
    failures: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What reward functions wrote down with ``log_metric``, of the completions that were judged together."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """What they wrote down with ``log_extra`` of this completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Where calls of a function run, and for how long."""

    timeout_s: float | None = None
    """Of one call; only of one that can be ended, a coroutine or in a worker process."""
    processes: int = 0
    """Worker processes; 0: this process."""
    withheld: Mapping[str, str] = field(default_factory=dict)
    """Of ``OFFERED``, what the function does not get, and why."""


def load_rewards_of(
    name: str, *, key: str, shown: str, weight: float, limits: CallLimits = CallLimits()
) -> list[Reward]:
    """Import ``module:name``: a function, or a rubric of verifiers, each of whose functions is a reward.

    Errors: ``RewardUnknown``, ``ConfigError`` with ``reward-signature``, ``reward-timeout`` or ``reward-processes``.

    >>> [one.name for one in load_rewards_of("math:isqrt", key="x", shown="root", weight=1.0)]
    Traceback (most recent call last):
    rollmatch.errors.ConfigError: [reward-signature] x: math:isqrt(n, /) cannot be called: too many positional ...
    """
    found = load_named(name, key=key, kind="function", refuse=RewardUnknown)
    functions, objects = getattr(found, "funcs", None), getattr(found, "class_objects", {})
    if isinstance(functions, list):
        named = [
            (function.__name__, function, weight * own) for function, own in zip(functions, found.weights, strict=True)
        ]
    elif callable(found):
        named = [(shown, found, weight)]
    else:
        remedy = "Name a function of (answer, sample), a reward function of TRL, or a rubric of verifiers."
        raise RewardUnknown(f"{name} is no function", key=key, remedy=remedy)
    rewards = []
    for own_name, function, own_weight in named:
        _check_limits(own_name, limits, key=key, is_async=inspect.iscoroutinefunction(function))
        shown_name = name if function is found else f"{name}.{own_name}"
        form = form_of(function, shown_name, key=key, objects=[*objects], withheld=limits.withheld)
        workers = None
        if limits.processes:
            modules = (function.__module__,)
            workers = WorkerProcesses(limits.processes, timeout_s=limits.timeout_s, modules=modules)
        call = RewardCall(function=function, form=form, objects=objects, timeout_s=limits.timeout_s, processes=workers)
        rewards.append(Reward(name=own_name, call=call, weight=own_weight))
    return rewards


def _check_limits(name: str, limits: CallLimits, *, key: str, is_async: bool) -> None:
    if is_async and limits.processes:
        problem, remedy = f"{name} is async: its calls run at the same time in this process", "Leave processes out."
        raise ConfigError(problem, code="reward-processes", key=key, remedy=remedy)
    if limits.timeout_s is not None and not is_async and not limits.processes:
        problem = f"{name} is not async: a call that runs in this process cannot be ended"
        remedy = "Set processes: 1 or more, write it as async def, or set no timeout_s."
        raise ConfigError(problem, code="reward-timeout", key=key, remedy=remedy)


_OF_THE_FUNCTION = (KeyError, IndexError, AttributeError, TypeError, NameError, ImportError)


def is_of_function(error: Exception) -> bool:
    """Whether a function does not fit the data, or itself; other errors may depend on the answer."""
    if isinstance(error, TargetError):
        return error.code in ("reward-count-wrong", "reward-not-a-number")
    return isinstance(error, _OF_THE_FUNCTION)


def try_out(rewards: Sequence[Reward], sample: Sample, offered: Mapping[str, object]) -> list[tuple[str, Exception]]:
    """Call each function, in this process, for two completions: a text from the sample's metadata as the answer.

    ``offered``: as of ``judge_all``; ``completion_ids`` are those of no tokenizer. Returns
    the names of those that failed, with the exception.
    """
    known = [value for value in sample.metadata.values() if isinstance(value, str | int | float)]
    answer = str(known[0]) if known else "0"
    found = []
    for reward in rewards:
        given = {"completion_ids": [[0], [0]], **offered, **Notes(num_completions=2).offered}
        value, _ = replace(reward.call, processes=None)([answer] * 2, [sample] * 2, given)
        if isinstance(judged := _finite(value, reward), Exception):
            found.append((reward.name, judged))
    return found


def judge_all(  # noqa: PLR0913  # what functions of three libraries ask for
    answers: Sequence[str],
    samples: Sequence[Sample],
    rewards: Sequence[Reward],
    *,
    seconds: dict[str, float] | None = None,
    offered: Mapping[str, object] = MappingProxyType({}),
    may_all_fail: bool = False,
) -> list[Judgement]:
    """Every answer by every function; one that fails for one answer costs only that.

    ``seconds``: of each function, to which those of this call are added. ``offered``: ``completion_ids`` and
    ``trainer_state``, as far as they are known, for functions of TRL's form.

    Errors: ``rewards-all-failed``, unless they may.
    """
    columns, notes = [], Notes(num_completions=len(answers))
    given = {**offered, **notes.offered}
    for reward in rewards:
        began = time.perf_counter()
        columns.append([_finite(value, reward) for value in reward.call(answers, samples, given)])
        if seconds is not None:
            seconds[reward.name] = seconds.get(reward.name, 0.0) + time.perf_counter() - began
    rows = zip(*columns, strict=True) if columns else [()] * len(answers)
    judged = [
        _judge(row, sample, rewards, *notes.of(place))
        for place, (row, sample) in enumerate(zip(rows, samples, strict=True))
    ]
    if judged and not may_all_fail and all(each.total is None for each in judged):
        raise TargetError(
            f"all {len(judged)} completions: {judged[0].failures[0]}",
            code="rewards-all-failed",
            key=samples[0].origin,
            remedy="Correct the reward function; it is called with the answer's text and its sample.",
        )
    return judged


def _judge(
    values: Sequence[Value],
    sample: Sample,
    rewards: Sequence[Reward],
    metrics: Mapping[str, float],
    columns: Mapping[str, object],
) -> Judgement:
    """A function that says nothing leaves the sum to the others; one that fails leaves the completion out."""
    failures = [
        f"{reward.name} on {sample.origin}: "
        + (str(value) if isinstance(value, RollmatchError) else f"{type(value).__name__}: {value}")
        for reward, value in zip(rewards, values, strict=True)
        if isinstance(value, Exception)
    ]
    numbers = [None if isinstance(value, Exception) else value for value in values]
    if not failures and values and all(value is None for value in values):
        failures = [f"{sample.origin}: no reward function says anything about this completion"]
    known = [reward.weight * value for reward, value in zip(rewards, numbers, strict=True) if value is not None]
    total = None if failures else math.fsum(known)
    return Judgement(values=tuple(numbers), total=total, failures=tuple(failures), metrics=metrics, columns=columns)


def _finite(value: Value, reward: Reward) -> Value:
    """A finite float, None where TRL's functions may return it or NaN, or the exception that says what is wrong."""
    is_trl = reward.call.form == "trl"
    if isinstance(value, Exception) or (value is None and is_trl):
        return value
    try:
        number = float(value)  # type: ignore[arg-type]  # the user's function may return anything
    except (TypeError, ValueError):
        return _no_number(f"returned {value!r:.40}", "reward-not-a-number", reward)
    if is_trl and math.isnan(number):  # how arrays and tensors hold None
        return None
    return number if math.isfinite(number) else _no_number(f"returned {number}", "reward-not-finite", reward)


def _no_number(problem: str, code: str, reward: Reward) -> TargetError:
    return TargetError(problem, code=code, key=reward.name, remedy="Return a finite number.")
