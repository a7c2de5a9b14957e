"""Inputs of a forecast: how GPUs are split, and what a learner rank generates and learns per optimizer step."""

from collections.abc import Iterator
from dataclasses import dataclass

from rollmatch.config import RunConfig, effective


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """GPUs that generate and GPUs that learn; the same ones if each learner process holds an engine."""

    num_serving: int
    num_learning: int
    tp: int = 1
    """GPUs of one engine."""
    is_colocated: bool = False

    @property
    def num_engines(self) -> int:
        """Replicas."""
        return self.num_serving // self.tp

    def __str__(self) -> str:
        if self.is_colocated:
            return f"{self.num_learning} colocated" + (f", tp {self.tp}" if self.tp > 1 else "")
        return f"{self.num_serving}v{self.num_learning}" + (f", tp {self.tp}" if self.tp > 1 else "")


def splits_of(num_gpus: int, *, tp: int, colocated: bool) -> Iterator[Split]:
    """All of them, engines of ``tp`` GPUs each.

    >>> [str(split) for split in splits_of(4, tp=1, colocated=False)]
    ['1v3', '2v2', '3v1']
    >>> [str(split) for split in splits_of(4, tp=2, colocated=True)]
    ['4 colocated, tp 2']
    """
    if colocated:
        if num_gpus % tp == 0:
            yield Split(num_serving=num_gpus, num_learning=num_gpus, tp=tp, is_colocated=True)
        return
    for num_serving in range(tp, num_gpus, tp):
        yield Split(num_serving=num_serving, num_learning=num_gpus - num_serving, tp=tp)


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
    num_passes: int
    """Forward and backward passes of the step."""

    @property
    def segment_len(self) -> int:
        """Prompt and response."""
        return self.prompt_len + self.response_len

    @property
    def num_tokens(self) -> int:
        """To learn from."""
        return self.num_rollouts * self.segment_len


PACKED_FILL = 0.97
"""Share of packed rows that tokens fill."""


def make_workload(config: RunConfig, *, prompt_len: int | None, response_len: int | None) -> Workload:
    """As configured; lengths that are not given are the longest that the configuration allows."""
    rules, training = config.custom.extra.rollout_matching, config.training
    longest = min(effective.max_model_len(config), config.global_max_length)
    response = response_len or min(rules.max_new_tokens, max(1, longest - 1))
    prompt = prompt_len or max(1, longest - response)
    generations = config.custom.extra.grpo.num_generations if config.custom.learns_from_completions else 1
    batch = training.per_device_train_batch_size * generations
    num_passes, row_len = training.gradient_accumulation_steps, batch * (prompt + response)
    if training.packing:
        row_len = config.global_max_length
    elif (most := training.tokens_per_micro_batch) is not None:
        num_passes = -(-batch // max(1, most // (prompt + response)))
        row_len = min(most, row_len)
    return Workload(
        num_rollouts=batch * training.gradient_accumulation_steps,
        prompt_len=prompt,
        response_len=response,
        row_len=row_len,
        fill=PACKED_FILL if training.packing else 1.0,
        max_model_len=longest,
        num_passes=num_passes,
    )
