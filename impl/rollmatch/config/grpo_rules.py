"""Rules of ``custom.extra.grpo`` that need more than one key; they hold for every variant with rewards."""

from collections import Counter
from collections.abc import Iterator

from rollmatch.config.removed import ROLLOUT_MATCHING
from rollmatch.config.rule import Rule
from rollmatch.config.schema import RunConfig
from rollmatch.errors import ConfigError

GRPO = "custom.extra.grpo"
VARIANT = "custom.trainer_variant"


class RewardsMissing(ConfigError):
    """Without a reward function there is nothing to learn."""

    code = "rewards-missing"


class RewardNamedTwice(ConfigError):
    """Two rewards would share a name in logs."""

    code = "reward-named-twice"


class GroupNotSampled(ConfigError):
    """Completions that compete are sampled: greedy ones are all the same."""

    code = "group-not-sampled"


class RatioCapUnderClip(ConfigError):
    """A ratio is capped above where it is clipped."""

    code = "ratio-cap-under-clip"


def _rewards(config: RunConfig) -> Iterator[ConfigError]:
    rewards = config.custom.extra.grpo.rewards
    is_paid = bool(rewards) or config.custom.extra.environment.name is not None
    if config.custom.learns_from_rewards and not is_paid:
        remedy = "Name one, as {function: package.module:function}, or an environment, which pays by its steps."
        yield RewardsMissing("names no reward function", key=f"{GRPO}.rewards", remedy=remedy)
    twice = [name for name, count in Counter(reward.shown_name for reward in rewards).items() if count > 1]
    if twice:
        remedy = "Give one of them a name of its own."
        yield RewardNamedTwice(f"two rewards are called {twice[0]}", key=f"{GRPO}.rewards", remedy=remedy)


def _sampled(config: RunConfig) -> Iterator[ConfigError]:
    rollout = config.custom.extra.rollout_matching
    is_greedy = rollout.decoding.temperature == 0 or rollout.num_beams > 1
    if config.custom.learns_from_rewards and is_greedy:
        problem, key = "is 0, or beams search: all completions of a group would be the same", "decoding.temperature"
        remedy = "Set it to 1, and decode_mode to greedy."
        yield GroupNotSampled(problem, key=f"{ROLLOUT_MATCHING}.{key}", remedy=remedy)


def _ratio_cap(config: RunConfig) -> Iterator[ConfigError]:
    rules = config.custom.extra.grpo
    high = 1 + (rules.epsilon if rules.epsilon_high is None else rules.epsilon_high)
    if rules.ratio_cap is not None and rules.ratio_cap <= high:
        remedy = "Raise it, or leave it null."
        yield RatioCapUnderClip(
            f"must be above {high}, but is {rules.ratio_cap}", key=f"{GRPO}.ratio_cap", remedy=remedy
        )


GRPO_RULES: tuple[Rule, ...] = (
    Rule(reads=(VARIANT, f"{GRPO}.rewards", "custom.extra.environment"), check=_rewards),
    Rule(reads=(VARIANT, f"{ROLLOUT_MATCHING}.decoding.temperature", f"{ROLLOUT_MATCHING}.num_beams"), check=_sampled),
    Rule(reads=(f"{GRPO}.ratio_cap", f"{GRPO}.epsilon", f"{GRPO}.epsilon_high"), check=_ratio_cap),
)
