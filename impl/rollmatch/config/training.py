"""The section ``training``: the optimizer, the run and the packing."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rollmatch.config.section import (
    Count,
    CountOrMinusOne,
    Index,
    Positive,
    PositiveShare,
    Section,
    ShareBelowOne,
    Text,
    Weight,
    as_tuple,
)

Reporter = Literal["tensorboard", "wandb", "none"]


def _as_reporters(value: Any) -> Any:
    """A single reporter stands for a list of one; YAML lists become tuples."""
    return (value,) if isinstance(value, str) else as_tuple(value)


class TrainingConfig(Section):
    """The optimizer, the run and the packing; names are those of transformers.TrainingArguments where it has them."""

    output_dir: Text = Field(examples=["runs/first"])
    """Directory for checkpoints, logs and the report."""
    seed: Index = 42
    """Seed of sample order, rollouts and initial adapters."""
    max_steps: CountOrMinusOne = -1
    """Optimizer steps; -1 goes by num_train_epochs."""
    num_train_epochs: Positive = 1.0
    """Passes over the training samples when max_steps is -1."""
    per_device_train_batch_size: Count = 1
    """Samples per learner rank and forward pass."""
    gradient_accumulation_steps: Count = 1
    """Forward passes per optimizer step."""
    learning_rate: Weight = 1e-5
    """Highest learning rate."""
    lr_scheduler_type: Text = "linear"
    """Course of the learning rate, by its name in transformers."""
    warmup_steps: Weight = 0.0
    """Optimizer steps until the highest learning rate; below 1 a share of all steps."""
    weight_decay: Weight = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Weight = 1.0
    """Gradients are scaled down to this norm; 0 leaves them."""
    optim: Text = "adamw_torch"
    """Optimizer, by its name in transformers."""
    adam_beta1: ShareBelowOne = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: ShareBelowOne = 0.999
    """Decay of Adam's second moment."""
    adam_epsilon: Positive = 1e-8
    """Adam's guard against division by zero."""
    bf16: bool = False
    """Compute in bfloat16 with float32 master weights."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    logging_steps: Count = 1
    """Optimizer steps between log lines."""
    eval_steps: Index = 0
    """Optimizer steps between evaluations; 0 evaluates only before and after training."""
    eval_scenes: Count | None = None
    """Evaluate only the first so many samples of val_jsonl; null all."""
    save_steps: Count = 50
    """Optimizer steps between checkpoints."""
    save_total_limit: Count | None = 2
    """Checkpoints that are kept; null keeps all."""
    report_to: Annotated[
        tuple[Reporter, ...],
        Field(min_length=1),
        BeforeValidator(_as_reporters, json_schema_input_type=Reporter | list[Reporter]),
    ] = ("tensorboard",)
    """Where metrics go besides the run's own journal; a name or a list."""
    packing: bool = False
    """Concatenate segments into rows of up to global_max_length tokens after the rollouts."""
    packing_buffer: Count = 512
    """Most segments kept for later rows; more is an error."""
    packing_min_fill_ratio: PositiveShare = 0.65
    """Rows filled less than this raise a warning."""
    packing_drop_last: bool = True
    """Segments still kept when training ends are dropped; must be true with packing."""
    learner_threads: Count | None = None
    """CPU threads of the learner; null leaves it to torch."""
    rollout_threads: Count | None = None
    """CPU threads of the rollout engine; null takes 1 on CPU and leaves it to vLLM on GPU."""
    extra_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further fields of transformers.TrainingArguments, passed on; none that has a key of its own here."""
