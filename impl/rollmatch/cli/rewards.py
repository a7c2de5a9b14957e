"""The configured reward functions. Needs no torch, so that a wrong name is told before anything starts."""

from rollmatch.config import RunConfig
from rollmatch.errors import ErrorList, RollmatchError
from rollmatch.objectives.grpo.reward import Reward, RewardUnknown, load_function


def load_rewards(config: RunConfig) -> tuple[Reward, ...]:
    """Import them; none for an objective that has no rewards. Errors: ``ErrorList`` of ``RewardUnknown``."""
    if not config.custom.learns_from_rewards:
        return ()
    rewards: list[Reward] = []
    errors: list[RollmatchError] = []
    for place, told in enumerate(config.custom.extra.grpo.rewards):
        try:
            function = load_function(told.function, key=f"custom.extra.grpo.rewards.{place}.function")
            rewards.append(Reward(name=told.shown_name, function=function, weight=told.weight))
        except RewardUnknown as error:
            errors.append(error)
    if errors:
        raise ErrorList(errors)
    return tuple(rewards)
