"""What one optimizer step has to generate and to learn, per learner rank."""

from dataclasses import dataclass

from rollmatch.config import RunConfig, effective


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Of one learner rank and optimizer step."""

    num_rollouts: int
    prompt_len: int
    response_len: int
    row_len: int
    """Tokens of one forward pass."""
    fill: float
    """Of its places, tokens."""
    max_model_len: int

    @property
    def segment_len(self) -> int:
        """Prompt and response."""
        return self.prompt_len + self.response_len

    @property
    def num_tokens(self) -> int:
        """To learn from."""
        return self.num_rollouts * self.segment_len


PACKED_FILL = 0.97


def make_workload(config: RunConfig, *, prompt_len: int | None, response_len: int | None) -> Workload:
    """As configured; lengths that are not told are the longest that the configuration allows."""
    rules, training = config.custom.extra.rollout_matching, config.training
    longest = min(effective.max_model_len(config), config.global_max_length)
    response = response_len or min(rules.max_new_tokens, max(1, longest - 1))
    prompt = prompt_len or max(1, longest - response)
    generations = config.custom.extra.grpo.num_generations if config.custom.learns_from_rewards else 1
    batch = training.per_device_train_batch_size * generations
    return Workload(
        num_rollouts=batch * training.gradient_accumulation_steps,
        prompt_len=prompt,
        response_len=response,
        row_len=config.global_max_length if training.packing else batch * (prompt + response),
        fill=PACKED_FILL if training.packing else 1.0,
        max_model_len=longest,
    )
