"""The sections ``model``, ``tuner`` and ``training``: the policy, what of it is trained, and how."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from rollmatch.config.connection import as_some
from rollmatch.config.section import (
    Count,
    CountOrMinusOne,
    Index,
    Listed,
    Positive,
    PositiveShare,
    Section,
    ShareBelowOne,
    Text,
    Weight,
)


def _module_regex(value: str) -> str:
    if re.search(r"\s", value):
        raise PydanticCustomError("regex_white_space", "Input should be a regular expression without white space")
    try:
        re.compile(value)
    except re.error as error:
        reason = {"reason": str(error)}
        raise PydanticCustomError(
            "regex_malformed", "Input should be a regular expression ({reason})", reason
        ) from None
    return value


class ModelConfig(Section):
    """The policy that is trained."""

    model: Text = Field(examples=["models/qwen3-vl-coord"])
    """Directory of a saved Hugging Face model with its tokenizer, or its id on the Hugging Face hub. A directory of a
    peft adapter stands for its base and model.adapter, that of a run for its newest checkpoint."""
    revision: Text | None = None
    """Branch, tag or commit of a hub id; null is its main branch."""
    adapter: Text | None = None
    """Directory or hub id of a LoRA adapter (peft) to start from."""
    adapter_start: Literal["merge", "continue"] = "merge"
    """merge adds model.adapter to the weights before training; continue trains it further (tuner.train_type: lora, with
    the adapter's own rank and targets; with grpo.beta a second copy of the policy is kept, as it starts)."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template, such as {enable_thinking: false}."""
    stop_token: Text | None = None
    """Token that ends a turn. null finds it: the first special token behind the assistant's text in the rendered chat
    template, else the tokenizer's eos_token. Responses also end at every eos_token_id of generation_config.json."""
    processor_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of the processor, such as {min_pixels: 3136, max_pixels: 501760}, for learner and engine."""
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the learner's weights. auto is float32 for full fine-tuning, and that of config.json for
    adapters."""
    attn_impl: Literal[
        "packed", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"
    ] = "packed"
    """Attention of the learner. packed isolates the segments of a row on every device; the other names are those of
    transformers."""


class TunerConfig(Section):
    """Which weights are trained."""

    train_type: Literal["full", "lora"] = "full"
    """full trains every weight that is not frozen; lora trains adapters (peft)."""
    use_dora: bool = False
    """Use DoRA adapters (magnitude and direction). Needs train_type: lora."""
    lora_rank: Count = 8
    """Rank r of the adapter matrices. Unit: dimensions."""
    lora_alpha: Count = 16
    """Adapter scale: the adapter's output is multiplied by lora_alpha / lora_rank. Unit: ratio."""
    lora_dropout: ShareBelowOne = 0.0
    """Dropout before the adapter. Unit: probability."""
    target_regex: Annotated[str, Field(min_length=1), AfterValidator(_module_regex)] | None = None
    """Regular expression for the full names of the modules to adapt. null adapts all linear layers."""
    use_rslora: bool = False
    """Scale adapters by lora_alpha / sqrt(lora_rank) instead of lora_alpha / lora_rank."""
    rank_pattern: dict[str, Count] = Field(default_factory=dict)
    """Ends of module names (regular expressions) with a rank of their own. Unit: dimensions."""
    alpha_pattern: dict[str, Count] = Field(default_factory=dict)
    """Ends of module names (regular expressions) with a lora_alpha of their own. Unit: ratio."""
    modules_to_save: Listed[Text] = ()
    """Modules that are trained in full beside the adapters, by the end of their names. Needs sync.mode: full."""
    trainable_token_indices: Literal["coord_tokens"] | list[Index] | dict[str, list[Index]] = Field(
        default_factory=list
    )
    """Ids of tokens whose embeddings are trained beside the adapters, such as added tokens; a mapping names the
    modules. coord_tokens trains the coordinate tokens, in the output head, too. Needs sync.mode: full."""
    freeze_llm: bool = False
    """Freeze the language model."""
    freeze_vit: bool = False
    """Freeze the vision tower."""
    freeze_aligner: bool = False
    """Freeze the projector between vision tower and language model."""


Reporter = Literal["tensorboard", "wandb", "none"]


def _as_reporters(value: Any) -> Any:
    """A single reporter stands for a list of one; YAML lists become tuples."""
    return (value,) if isinstance(value, str) else as_some(value)


TRAINER_KEYS = (
    "seed",
    "max_steps",
    "num_train_epochs",
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "optim",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "bf16",
    "logging_steps",
    "save_steps",
    "save_total_limit",
    "output_dir",
)
"""Keys of ``training`` that transformers, TRL and ms-swift have by the same name and with the same meaning."""


NOT_USED = frozenset(
    {
        "data_seed",
        "ignore_data_skip",
        "train_sampling_strategy",
        "length_column_name",
        "remove_unused_columns",
        "label_names",
        "label_smoothing_factor",
        "average_tokens_across_devices",
        "resume_from_checkpoint",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "eval_accumulation_steps",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "include_for_metrics",
        "batch_eval_metrics",
        "bf16_full_eval",
        "fp16_full_eval",
        "do_train",
        "do_eval",
        "do_predict",
        "disable_tqdm",
        "skip_memory_metrics",
        "hub_token",
    }
)
"""Fields of transformers.TrainingArguments that have no effect, or a wrong one: what would read them is replaced."""


FURTHER = frozenset(
    {
        "accelerator_config",
        "auto_find_batch_size",
        "dataloader_drop_last",
        "dataloader_in_order",
        "dataloader_multiprocessing_context",
        "dataloader_num_workers",
        "dataloader_persistent_workers",
        "dataloader_pin_memory",
        "dataloader_prefetch_factor",
        "ddp_backend",
        "ddp_broadcast_buffers",
        "ddp_bucket_cap_mb",
        "ddp_find_unused_parameters",
        "ddp_static_graph",
        "ddp_timeout",
        "debug",
        "enable_jit_checkpoint",
        "eval_delay",
        "fp16",
        "full_determinism",
        "gradient_checkpointing_kwargs",
        "greater_is_better",
        "hub_always_push",
        "hub_model_id",
        "hub_private_repo",
        "hub_revision",
        "hub_strategy",
        "include_num_input_tokens_seen",
        "liger_kernel_config",
        "load_best_model_at_end",
        "log_level",
        "log_level_replica",
        "log_on_each_node",
        "logging_first_step",
        "logging_nan_inf_filter",
        "lr_scheduler_kwargs",
        "metric_for_best_model",
        "neftune_noise_alpha",
        "optim_args",
        "optim_target_modules",
        "parallelism_config",
        "project",
        "push_to_hub",
        "restore_callback_states_from_checkpoint",
        "run_name",
        "save_on_each_node",
        "save_only_model",
        "save_strategy",
        "tf32",
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "torch_empty_cache_steps",
        "trackio_bucket_id",
        "trackio_space_id",
        "trackio_static_space_id",
        "use_cache",
        "use_liger_kernel",
    }
)
"""Fields of transformers.TrainingArguments without a key here, which training.extra_arguments takes."""


class EarlyStopping(Section):
    """End training, with a checkpoint, when the evaluations no longer get better. Needs eval_steps."""

    metric: Text = Field(examples=["f1"])
    """A metric of the evaluations, such as f1 or reward; those that there are stand in evaluations/step-000000.json."""
    patience: Count = 3
    """Evaluations in a row without a better value after which training ends. Unit: evaluations."""
    threshold: Weight = 0.0
    """A value is better if it differs from the best one by more than this. Unit: that of the metric."""
    greater_is_better: bool = True
    """Whether a greater value is the better one."""


class TrainingConfig(Section):
    """Optimizer, run and packing. Keys are those of transformers.TrainingArguments where it has them."""

    output_dir: Text = Field(examples=["runs/first"])
    """Run directory: checkpoints, journal.jsonl, TensorBoard logs, run.html."""
    seed: Index = 42
    """Seed of the sample order, of every rollout request and of new adapters. Unit: integer."""
    max_steps: CountOrMinusOne = -1
    """Length of the run. -1 uses num_train_epochs. Unit: optimizer steps."""
    num_train_epochs: Positive = 1.0
    """Length of the run when max_steps is -1. Unit: epochs."""
    per_device_train_batch_size: Count = 1
    """Samples of one forward pass, per learner rank; of one optimizer step with tokens_per_micro_batch.
    Unit: samples."""
    tokens_per_micro_batch: Count | None = None
    """Most tokens of one forward pass, per learner rank. An optimizer step then takes as many passes as its segments
    need, on every rank as many and of about as many tokens; nothing is padded. At least global_max_length. Needs
    gradient_accumulation_steps 1, no packing, and model.attn_impl: packed. null gives each pass a number of samples.
    Unit: tokens."""
    gradient_accumulation_steps: Count = 1
    """Forward passes of one optimizer step, per learner rank. Unit: micro-batches."""
    learning_rate: Weight = 1e-5
    """Peak learning rate. Unit: step size."""
    lr_scheduler_type: Text = "linear"
    """Learning rate schedule, by its name in transformers."""
    warmup_steps: Weight = 0.0
    """Steps until the peak learning rate; a value below 1 is a share of all steps. Unit: optimizer steps."""
    weight_decay: Weight = 0.0
    """Decoupled weight decay. Unit: coefficient."""
    max_grad_norm: Weight = 1.0
    """Gradients with a larger norm are scaled down to this norm; 0 disables clipping. Unit: L2 norm."""
    optim: Text = "adamw_torch"
    """Optimizer, by its name in transformers."""
    adam_beta1: ShareBelowOne = 0.9
    """Decay rate of Adam's first moment. Unit: coefficient."""
    adam_beta2: ShareBelowOne = 0.999
    """Decay rate of Adam's second moment. Unit: coefficient."""
    adam_epsilon: Positive = 1e-8
    """Added to Adam's denominator. Unit: coefficient."""
    bf16: bool = False
    """Compute in bfloat16 by autocast. Full fine-tuning then keeps weights and optimizer state in float32, whatever
    model.torch_dtype is."""
    allow_half_weights: bool = False
    """Allow Adam to train weights in bfloat16 or float16. At a learning rate of 1e-5 a step changes 5 to 15 % of such
    weights; the rest never moves."""
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """Recompute activations in the backward pass: less memory, about a third more time. auto recomputes only the layers
    whose activations do not fit."""
    checkpointing_memory: PositiveShare = 0.9
    """With gradient_checkpointing: auto, the memory that may be in use: the GPU's, or without one the machine's (its
    container's). Unit: share of the memory."""
    compile_layers: Literal["auto"] | bool = "auto"
    """Compile each decoder layer with torch.compile: about half the learning time, one to two minutes of compilation in
    the first step. auto compiles policies of a billion parameters and more on a GPU, without lora_dropout, under ddp
    and (without use_dora) fsdp2."""
    logging_steps: Count = 1
    """Steps between log lines. Unit: optimizer steps."""
    eval_steps: Index = 0
    """Steps between evaluations; 0 evaluates only before and after training. Unit: optimizer steps."""
    eval_on_start: bool = True
    """Evaluate before the first step, which the end is compared with."""
    eval_scenes: Count | None = None
    """Evaluate only the first held-out samples; null evaluates all. Unit: samples."""
    early_stopping: EarlyStopping | None = None
    """When to end training before max_steps; null never does."""
    callbacks: Listed[Text] = ()
    """Callbacks of transformers, each as module:class; a class is made without arguments."""
    logged_completions: Index = 1
    """Training completions that the journal and the run page keep of each step, rounded up to whole groups.
    Unit: completions."""
    save_steps: Count = 50
    """Steps between checkpoints. Unit: optimizer steps."""
    save_total_limit: Count | None = 2
    """Checkpoints to keep; null keeps all. Unit: checkpoints."""
    report_to: Annotated[
        tuple[Reporter, ...],
        BeforeValidator(
            _as_reporters, json_schema_input_type=Reporter | Annotated[list[Reporter], Field(min_length=1)]
        ),
    ] = ("tensorboard",)
    """Where metrics go besides the run's own journal: one name or a list."""
    strategy: Text = "ddp"
    """How learner ranks share the policy. ddp: every rank holds all of it. fsdp2: a rank holds parts of weights,
    gradients and optimizer state (torch, by accelerate). deepspeed_zero2, deepspeed_zero3: the same by DeepSpeed, on
    GPUs; zero2 leaves weights whole. Or a file: a DeepSpeed JSON, or settings of fsdp2."""
    packing: bool = False
    """Pack segments into rows of up to global_max_length tokens (one forward pass each)."""
    padding_free: Literal["auto"] | bool = "auto"
    """Without packing, concatenate the segments of a micro-batch instead of padding them, and give all micro-batches of
    a step about as many tokens. Needs model.attn_impl: packed. auto does so on a GPU in half precision."""
    share_prompts: Literal["auto"] | bool = "auto"
    """Compute a prompt that several completions of a forward pass have once for all of them: the same losses and
    gradients, for fewer tokens. Needs packing, padding_free or tokens_per_micro_batch. auto does so without dropout,
    which would be one for all of them."""
    packing_buffer: Count | None = None
    """Most segments that may wait for a row of the next step; where more would, a step makes more rows than
    gradient_accumulation_steps. null: as many as a step brings. Unit: segments."""
    packing_min_fill_ratio: PositiveShare = 0.65
    """Rows filled less than this are reported as a warning. Unit: share of global_max_length."""
    packing_drop_last: bool = False
    """Drop the segments that still wait when training ends. false: the last step has rows for all of them."""
    learner_threads: Count | None = None
    """CPU threads of the learner; null uses torch's default. Unit: threads."""
    rollout_threads: Count | None = None
    """CPU threads of the rollout engine; null is 1 on a CPU and vLLM's default on a GPU. Unit: threads."""
    extra_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further fields of transformers.TrainingArguments, by name. Fields that have a key here are rejected."""
