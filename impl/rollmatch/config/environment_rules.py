"""Rules of ``custom.extra.environment`` that need more than one key."""

from collections.abc import Iterator

from rollmatch.config.removed import ROLLOUT_MATCHING
from rollmatch.config.rule import Rule
from rollmatch.config.schema import RunConfig
from rollmatch.errors import ConfigError

ENVIRONMENT = "custom.extra.environment"
MOST_TOKENS = f"{ROLLOUT_MATCHING}.max_new_tokens"


class EnvironmentNotPlayed(ConfigError):
    """Only what learns from rewards plays in an environment."""

    code = "environment-not-played"


class EnvironmentBesideRewards(ConfigError):
    """An environment pays for its episodes, and no reward function does besides."""

    code = "environment-beside-rewards"


class EpisodeLengthMisfit(ConfigError):
    """An episode has room for a whole turn, and leaves room for its prompt."""

    code = "episode-length-misfit"


def _variant(config: RunConfig) -> Iterator[ConfigError]:
    if config.custom.extra.environment.name is not None and not config.custom.learns_from_rewards:
        problem = f"is named, but custom.trainer_variant is {config.custom.trainer_variant}"
        remedy = "Set trainer_variant to grpo, vineppo or vineppo_mcts, or leave the environment out."
        yield EnvironmentNotPlayed(problem, key=f"{ENVIRONMENT}.name", remedy=remedy)


def _rewards(config: RunConfig) -> Iterator[ConfigError]:
    if config.custom.extra.environment.name is not None and config.custom.extra.grpo.rewards:
        problem = "is named, and custom.extra.grpo.rewards names functions"
        remedy = "Leave the functions out, and let the environment's steps pay."
        yield EnvironmentBesideRewards(problem, key=f"{ENVIRONMENT}.name", remedy=remedy)


def _length(config: RunConfig) -> Iterator[ConfigError]:
    told, turn = config.custom.extra.environment, config.custom.extra.rollout_matching.max_new_tokens
    if told.name is None:
        return
    key = f"{ENVIRONMENT}.max_response_tokens"
    if told.max_response_tokens >= config.global_max_length:
        problem = f"must be below global_max_length {config.global_max_length}, but is {told.max_response_tokens}"
        yield EpisodeLengthMisfit(problem, key=key, remedy="Lower it by the length of a prompt, or raise the other.")
    elif told.max_response_tokens < turn:
        problem = f"must be at least max_new_tokens {turn}, but is {told.max_response_tokens}"
        yield EpisodeLengthMisfit(problem, key=key, remedy="Raise it, or lower max_new_tokens: that is of one turn.")


ENVIRONMENT_RULES: tuple[Rule, ...] = (
    Rule(reads=("custom.trainer_variant", ENVIRONMENT), check=_variant),
    Rule(reads=("custom.extra.grpo.rewards", ENVIRONMENT), check=_rewards),
    Rule(reads=("global_max_length", MOST_TOKENS, ENVIRONMENT), check=_length),
)
