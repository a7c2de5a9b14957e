"""Rules of what goes into a forward pass: packing, padding, micro-batches by tokens."""

from collections.abc import Iterator

from rollmatch.config.schema import Rule, RunConfig
from rollmatch.config.strategy import read_strategy
from rollmatch.errors import ConfigError

TOKENS = "training.tokens_per_micro_batch"


def _padding_free(config: RunConfig) -> Iterator[ConfigError]:
    if config.training.padding_free is True and config.model.attn_impl != "packed":
        problem = f"is true, but attention {config.model.attn_impl} would let the segments of a row see each other"
        remedy = "Set model.attn_impl to packed, or this to auto or false."
        yield ConfigError(problem, code="padding-free-attention", key="training.padding_free", remedy=remedy)


def _row_length(config: RunConfig) -> Iterator[ConfigError]:
    size, longest = config.training.tokens_per_micro_batch, config.global_max_length
    if size is not None and size < longest:
        problem = f"is {size}, but a segment may have global_max_length {longest} tokens, and none is split"
        remedy = f"Raise it to {longest}, or lower global_max_length."
        yield ConfigError(problem, code="micro-batch-below-segment", key=TOKENS, remedy=remedy)


def _fixed_batches(config: RunConfig) -> Iterator[ConfigError]:
    """What decides about passes in another way."""
    training, accumulation = config.training, config.training.gradient_accumulation_steps
    if training.tokens_per_micro_batch is None:
        return
    if training.packing:
        problem = "is true, but training.tokens_per_micro_batch packs the segments of each step, and none waits"
        remedy = "Set it to false, or remove tokens_per_micro_batch: rows then have global_max_length."
        yield ConfigError(problem, code="micro-batch-twice", key="training.packing", remedy=remedy)
    if training.padding_free is False:
        problem, remedy = f"is false, but {TOKENS} pads nothing", "Remove it, or tokens_per_micro_batch."
        yield ConfigError(problem, code="micro-batch-twice", key="training.padding_free", remedy=remedy)
    if accumulation > 1:
        samples = training.per_device_train_batch_size * accumulation
        yield ConfigError(
            f"is {accumulation}, but with {TOKENS} the number of passes follows from the tokens",
            code="micro-batch-twice",
            key="training.gradient_accumulation_steps",
            remedy=f"Set it to 1, and per_device_train_batch_size to {samples} for as many samples per step.",
        )


def _row_attention(config: RunConfig) -> Iterator[ConfigError]:
    if config.training.tokens_per_micro_batch is not None and config.model.attn_impl != "packed":
        problem = f"is set, but attention {config.model.attn_impl} would let the segments of a row see each other"
        remedy = "Set model.attn_impl to packed, or remove it."
        yield ConfigError(problem, code="padding-free-attention", key=TOKENS, remedy=remedy)


def _row_strategy(config: RunConfig) -> Iterator[ConfigError]:
    strategy = config.training.strategy
    if config.training.tokens_per_micro_batch is not None and read_strategy(strategy).engine == "deepspeed":
        problem = f"is {strategy}, but {TOKENS} is set: DeepSpeed was never run with a varying number of passes"
        remedy = "Set it to ddp or fsdp2, or remove tokens_per_micro_batch."
        yield ConfigError(problem, code="micro-batch-strategy", key="training.strategy", remedy=remedy)


def _shared_prompts(config: RunConfig) -> Iterator[ConfigError]:
    training = config.training
    if training.share_prompts is not True:
        return
    key, problem = "training.share_prompts", "is true, but segments of a forward pass are not concatenated"
    if not (training.packing or training.padding_free is True or training.tokens_per_micro_batch):
        remedy = "Set training.padding_free to true, or share_prompts to auto."
        yield ConfigError(problem, code="prompts-not-shared", key=key, remedy=remedy)
    if config.model.attn_impl != "packed":
        problem = f"is true, but attention {config.model.attn_impl} knows no prompt of several segments"
        remedy = "Set model.attn_impl to packed, or remove share_prompts."
        yield ConfigError(problem, code="prompts-not-shared", key=key, remedy=remedy)


BATCH_RULES: tuple[Rule, ...] = (
    Rule(reads=("training.padding_free", "model.attn_impl"), check=_padding_free),
    Rule(reads=(TOKENS, "global_max_length"), check=_row_length),
    Rule(
        reads=(
            TOKENS,
            "training.packing",
            "training.padding_free",
            "training.gradient_accumulation_steps",
            "training.per_device_train_batch_size",
        ),
        check=_fixed_batches,
    ),
    Rule(reads=(TOKENS, "model.attn_impl"), check=_row_attention),
    Rule(
        reads=("training.share_prompts", "training.packing", "training.padding_free", TOKENS, "model.attn_impl"),
        check=_shared_prompts,
    ),
    Rule(reads=(TOKENS, "training.strategy"), check=_row_strategy),
)
