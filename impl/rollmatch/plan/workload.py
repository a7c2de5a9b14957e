"""Inputs of a forecast: how GPUs are split, and what a learner rank generates and learns per optimizer step."""

from collections.abc import Iterator
from dataclasses import dataclass

from rollmatch.config import RunConfig, effective
from rollmatch.plan.shape import ModelShape


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
    row_repeated: int = 0
    """Tokens of prompts that stand in it once for several completions, counted for each of these."""
    fill: float
    """Of its places, tokens."""
    max_model_len: int
    num_passes: int
    """Forward and backward passes of the step."""
    num_prompts: int
    """That are computed: one for each rollout, unless they are shared."""

    @property
    def segment_len(self) -> int:
        """Prompt and response."""
        return self.prompt_len + self.response_len

    @property
    def num_tokens(self) -> int:
        """To learn from; of a shared prompt its last token for each rollout, the others once."""
        return self.num_rollouts * self.segment_len - (self.num_rollouts - self.num_prompts) * (self.prompt_len - 1)

    @property
    def num_pairs(self) -> float:
        """Of a token and one before it that it attends to."""
        whole, prompt = self.segment_len**2 / 2, self.prompt_len**2 / 2
        return self.num_rollouts * whole - (self.num_rollouts - self.num_prompts) * prompt


PACKED_FILL = 0.97
"""Share of packed rows that tokens fill."""


def shares_prompts(config: RunConfig, shape: ModelShape) -> bool:
    """Whether completions of a prompt compute it once, on a GPU with a flash kernel; packed rows, which may be full of
    completions of different prompts, are counted whole.
    """
    training, tuner = config.training, config.tuner
    is_half = training.bf16 or shape.dtype != "float32"
    concatenates = training.padding_free is True or (training.padding_free == "auto" and is_half)
    if training.packing or config.model.attn_impl != "packed":
        return False
    if not (concatenates or training.tokens_per_micro_batch):
        return False
    drops = shape.has_dropout or (tuner.train_type == "lora" and tuner.lora_dropout > 0)
    return not drops if training.share_prompts == "auto" else training.share_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Completions of one prompt; ``size`` 1: each with a prompt of its own.

    >>> group = Group(size=4, prompt_len=11, response_len=5)
    >>> [group.num_tokens(number) for number in (1, 2, 4, 5)], group.most_within(50)
    ([16, 22, 34, 50], 5)
    """

    size: int
    prompt_len: int
    response_len: int

    def num_prompts(self, num: int) -> int:
        """Of ``num`` completions in a row."""
        return -(-num // self.size)

    def num_tokens(self, num: int) -> int:
        """Of ``num`` completions in a row."""
        repeated = num - self.num_prompts(num)
        return num * (self.prompt_len + self.response_len) - repeated * (self.prompt_len - 1)

    def most_within(self, capacity: int) -> int:
        """Completions in a row of at most ``capacity`` tokens, one at least."""
        whole, rest = divmod(capacity, self.num_tokens(self.size))
        first = self.num_tokens(1)
        more = 0 if rest < first else 1 + (rest - first) // (self.response_len + 1)
        return max(1, whole * self.size + min(more, self.size - 1))


def make_workload(
    config: RunConfig, shape: ModelShape, *, prompt_len: int | None, response_len: int | None
) -> Workload:
    """As configured; lengths that are not given are the longest that the configuration allows."""
    rules, training = config.custom.extra.rollout_matching, config.training
    longest = min(effective.max_model_len(config), config.global_max_length)
    response = response_len or min(rules.max_new_tokens, max(1, longest - 1))
    prompt = prompt_len or max(1, longest - response)
    generations = config.custom.extra.grpo.num_generations if config.custom.learns_from_completions else 1
    group = Group(size=generations if shares_prompts(config, shape) else 1, prompt_len=prompt, response_len=response)
    in_row, num_passes = training.per_device_train_batch_size * generations, training.gradient_accumulation_steps
    num_rollouts = in_row * num_passes
    row_len = group.num_tokens(in_row)
    if training.packing:
        row_len = config.global_max_length
    elif (most := training.tokens_per_micro_batch) is not None:
        num_passes = -(-num_rollouts // group.most_within(most))
        in_row = -(-num_rollouts // num_passes)
        row_len = min(most, group.num_tokens(num_rollouts))
    num_full, rest = divmod(num_rollouts, in_row)
    return Workload(
        num_rollouts=num_rollouts,
        prompt_len=prompt,
        response_len=response,
        row_len=row_len,
        row_repeated=in_row * (prompt - 1) if group.size > 1 else 0,
        fill=PACKED_FILL if training.packing else 1.0,
        max_model_len=longest,
        num_passes=num_passes,
        num_prompts=num_full * group.num_prompts(in_row) + group.num_prompts(rest),
    )
