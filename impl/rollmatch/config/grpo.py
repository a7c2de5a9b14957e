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
    """The function, as module:function; called as function(answer: str, sample) -> float."""
    weight: float = 1.0
    """Weight in the sum of rewards. Unit: reward weight."""
    name: Text | None = None
    """Name in logs; null uses the function's name."""

    @property
    def shown_name(self) -> str:
        """As it stands in logs."""
        return self.name or self.function.rpartition(":")[2]


class GrpoConfig(Section):
    """Groups, rewards and policy gradient (grpo, vineppo, vineppo_mcts). Generation: see rollout_matching."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """Group size: completions per prompt, whose rewards are compared. Unit: completions."""
    rewards: Annotated[
        tuple[RewardConfig, ...], BeforeValidator(as_tuple, json_schema_input_type=list[RewardConfig])
    ] = ()
    """Reward functions, summed by weight. trainer_variant: grpo needs at least one, or an environment."""
    steps_per_generation: Count = 1
    """Optimizer steps served by one generation phase. Unit: optimizer steps."""
    num_iterations: Count = 1
    """Passes over the completions of one generation phase (mu in GRPO). Unit: passes."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a reward is compared with: the mean of its group, or of the other members (leave_one_out, RLOO)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divisor of the difference: standard deviation of the group, of the batch, or none (Dr. GRPO)."""
    mask_truncated_completions: bool = False
    """Exclude completions that reached the length limit from the loss."""
    normalize: Literal["token", "sequence", "constant"] = "token"
    """Denominator of the loss: token (DAPO), sequence (GRPO), or constant, i.e. completions * max_new_tokens (Dr.
    GRPO)."""
    epsilon: ShareBelowOne = 0.2
    """Lower clip: the probability ratio is clipped below 1 - epsilon. Unit: ratio."""
    epsilon_high: Positive | None = None
    """Upper clip: the probability ratio is clipped above 1 + epsilon_high; null uses epsilon. Unit: ratio."""
    ratio_cap: Positive | None = None
    """Largest ratio for negative advantages (two-sided clipping, delta in TRL); null disables it. Unit: ratio."""
    beta: Weight = 0.0
    """Weight of the KL divergence from the reference policy; 0 needs no reference. Unit: loss weight."""
    old_logprobs: Literal["recomputed", "server"] = "recomputed"
    """Denominator of the ratio: recomputed by the learner, or server for those the engine sampled with."""
    correction_cap: Positive | None = 2.0
    """Cap of the importance weight that corrects for differences between engine and learner; null disables the
    correction. Unit: ratio."""
    eval_temperature: Weight = 0.0
    """Sampling temperature in evaluation; 0 is greedy. Unit: divisor of the logits."""
