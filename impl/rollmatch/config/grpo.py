"""The section ``custom.extra.grpo``: groups, rewards, and the policy gradient."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from rollmatch.config.section import Count, Positive, Section, ShareBelowOne, Text, Weight, as_tuple


def _check_function(value: str) -> str:
    module, _, function = value.partition(":")
    if not module or not function.isidentifier():
        raise PydanticCustomError("reward_function", "Input should be module:function")
    return value


class RewardConfig(Section):
    """One reward function."""

    function: Annotated[Text, AfterValidator(_check_function)] = Field(examples=["builtins:len"])
    """A function of (answer text, sample) that gives a number, as module:function."""
    weight: float = 1.0
    """What it counts in the sum."""
    name: Text | None = None
    """Its name in logs; null takes the function's."""

    @property
    def shown_name(self) -> str:
        """As it stands in logs."""
        return self.name or self.function.rpartition(":")[2]


class GrpoConfig(Section):
    """Groups of completions, their rewards, and the policy gradient; rollouts are made as rollout_matching says."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions of each prompt, which compete with each other."""
    rewards: Annotated[
        tuple[RewardConfig, ...], BeforeValidator(as_tuple, json_schema_input_type=list[RewardConfig])
    ] = ()
    """Reward functions, summed by weight; at least one for trainer_variant grpo."""
    steps_per_generation: Count = 1
    """Optimizer steps whose prompts are answered together."""
    num_iterations: Count = 1
    """Passes over them."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a reward is compared with: the mean of its group, or of the group's other members."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What the difference is divided by: the standard deviation of its group, of all rewards, or nothing."""
    mask_truncated_completions: bool = False
    """Leave completions that ran into their length limit out of the loss."""
    normalize: Literal["token", "sequence", "constant"] = "token"
    """What the loss is a mean over: tokens, completions (each by its own tokens), or completions of full length."""
    epsilon: ShareBelowOne = 0.2
    """How far the ratio may fall below 1 before it is clipped."""
    epsilon_high: Positive | None = None
    """How far the ratio may rise above 1; null takes epsilon."""
    ratio_cap: Positive | None = None
    """Largest ratio of a completion that is to become less likely; null leaves it."""
    beta: Weight = 0.0
    """Weight of the distance to the policy before training."""
    old_logprobs: Literal["recomputed", "server"] = "recomputed"
    """Where the ratio starts: the learner's own log-probabilities, or those the engine sampled with."""
    correction_cap: Positive | None = 2.0
    """Largest weight of the correction for an engine that differs from the learner; null does not correct."""
    eval_temperature: Weight = 0.0
    """Temperature of the completions of an evaluation."""
