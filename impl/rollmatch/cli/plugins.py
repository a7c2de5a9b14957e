"""Reward functions and environments that the configuration names. Import no torch, so that ``check`` can load them."""

import inspect
from collections.abc import Sequence

from rollmatch.config import RunConfig
from rollmatch.errors import ConfigError, ErrorList, RollmatchError, TargetError
from rollmatch.objectives.environment import MakeEnvironment, load_environment, show
from rollmatch.objectives.grpo.reward import Reward, RewardFunction, load_function
from rollmatch.records import Sample


def load_rewards(config: RunConfig) -> tuple[Reward, ...]:
    """Import them; none for an objective that has no rewards.

    Errors: ``ErrorList`` of ``RewardUnknown`` and ``reward-signature``.
    """
    if not config.custom.learns_from_rewards:
        return ()
    rewards: list[Reward] = []
    errors: list[RollmatchError] = []
    for place, entry in enumerate(config.custom.extra.grpo.rewards):
        try:
            key = f"custom.extra.grpo.rewards.{place}.function"
            function = load_function(entry.function, key=key)
            _check_signature(function, entry.function, key=key)
            rewards.append(Reward(name=entry.shown_name, function=function, weight=entry.weight))
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise ErrorList(errors)
    return tuple(rewards)


def _check_signature(function: RewardFunction, name: str, *, key: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind("answer", "sample")
    except TypeError as error:
        problem = f"{name}{signature} cannot be called with (answer, sample): {error}"
        remedy = "Write it as function(answer: str, sample: Sample) -> float."
        raise ConfigError(problem, code="reward-signature", key=key, remedy=remedy) from error


def load_configured_environment(config: RunConfig) -> MakeEnvironment | None:
    """What makes environments; None where none is named. Errors: ``EnvironmentUnknown``, ``EnvironmentMisfit``."""
    entry = config.custom.extra.environment
    if entry.name is None:
        return None
    return load_environment(entry.name, entry.options, key="custom.extra.environment.name")


def with_first_observations(config: RunConfig, samples: Sequence[Sample]) -> list[Sample]:
    """Samples with what their environments show first; as they are where there is no environment.

    Errors: ``ErrorList`` of what environments could not begin with.
    """
    make = load_configured_environment(config)
    if make is None:
        return list(samples)
    prompts = config.custom.prompts
    system = (("system", prompts.system),) if prompts.system else ()
    prompt = (*system, ("user", prompts.user))
    shown: list[Sample] = []
    errors: list[TargetError] = []
    for sample in samples:
        try:
            shown.append(show(make, sample, run_seed=config.training.seed, asked=prompt))
        except TargetError as error:
            errors.append(error)
    if errors:
        raise ErrorList(errors)
    return shown
