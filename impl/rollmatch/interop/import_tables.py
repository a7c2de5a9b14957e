"""Names and defaults of TRL's and ms-swift's arguments beside ours, for ``import_config``.

Sources: TRL 1.10 ``trainer/grpo_config.py``, ``trainer/model_config.py``; ms-swift 4.6 ``arguments/rlhf_args.py``. What
they say of themselves is recorded in ``fixtures/trl`` and ``fixtures/swift``.
"""

from rollmatch.config.training import TRAINER_KEYS

GRPO, MATCHING = "custom.extra.grpo", "custom.extra.rollout_matching"
SERVER, VLLM = f"{MATCHING}.vllm.server", f"{MATCHING}.vllm"
TRAINING = (*TRAINER_KEYS, "eval_steps", "gradient_checkpointing")
OF_TRANSFORMERS = (
    "lr_scheduler_kwargs",
    "optim_args",
    "optim_target_modules",
    "run_name",
    "tf32",
    "ddp_timeout",
    "fp16",
    "save_only_model",
)
"""Fields of ``transformers.TrainingArguments`` that work as they are."""
TUNER = (
    "use_dora",
    "use_rslora",
    "lora_alpha",
    "lora_dropout",
    "freeze_vit",
    "freeze_llm",
    "freeze_aligner",
    "target_regex",
    "modules_to_save",
)
SHARED = (
    {name: f"training.{name}" for name in TRAINING}
    | {name: f"training.extra_arguments.{name}" for name in OF_TRANSFORMERS}
    | {name: f"tuner.{name}" for name in TUNER}
    | {
        name: f"{GRPO}.{name}"
        for name in ("num_generations", "num_iterations", "epsilon", "epsilon_high", "beta", "entropy_coef")
    }
    | {"top_entropy_quantile": f"{GRPO}.top_entropy_share"}
    | {
        "delta": f"{GRPO}.ratio_cap",
        "max_completion_length": f"{MATCHING}.max_new_tokens",
        "repetition_penalty": f"{MATCHING}.repetition_penalty",
        "temperature": f"{MATCHING}.decoding.temperature",
        "top_p": f"{MATCHING}.decoding.top_p",
        "model_revision": "model.revision",
        "vllm_gpu_memory_utilization": f"{VLLM}.gpu_memory_utilization",
        "vllm_tensor_parallel_size": f"{VLLM}.tensor_parallel_size",
        "vllm_server_timeout": f"{SERVER}.timeout_s",
        "vllm_group_port": f"{SERVER}.group_port",
        "vllm_server_group_port": f"{SERVER}.group_port",
        "vllm_server_base_url": f"{SERVER}.base_url",
    }
)
TRL = {
    "model_name_or_path": "model.model",
    "dtype": "model.torch_dtype",
    "torch_dtype": "model.torch_dtype",
    "lora_r": "tuner.lora_rank",
    "lora_modules_to_save": "tuner.modules_to_save",
    "chat_template_kwargs": "model.chat_template_kwargs",
    "vllm_max_model_length": f"{VLLM}.max_model_len",
    "dataset_config": "custom.dataset.name",
    "dataset_train_split": "custom.dataset.train",
    "dataset_test_split": "custom.dataset.val",
}
SWIFT = {
    "model": "model.model",
    "torch_dtype": "model.torch_dtype",
    "lora_rank": "tuner.lora_rank",
    "MAX_PIXELS": "model.processor_kwargs.max_pixels",
    "tuner_type": "tuner.train_type",
    "train_type": "tuner.train_type",
    "vllm_max_model_len": f"{VLLM}.max_model_len",
    "vllm_max_num_seqs": f"{VLLM}.max_num_seqs",
    "vllm_enforce_eager": f"{VLLM}.enforce_eager",
    "vllm_enable_lora": f"{VLLM}.enable_lora",
    "vllm_enable_prefix_caching": f"{VLLM}.enable_prefix_caching",
    "vllm_limit_mm_per_prompt": f"{VLLM}.limit_mm_per_prompt",
    "model_type": "custom.extra.swift.model_type",
    "template": "custom.extra.swift.template",
}
OF_MODEL = {"dtype": "model.torch_dtype", "torch_dtype": "model.torch_dtype", "revision": "model.revision"}
"""Arguments of ``from_pretrained`` -> our keys."""
STRATEGIES = {"zero2": "deepspeed_zero2", "zero3": "deepspeed_zero3"}
NORMALIZE = {"grpo": "sequence", "dapo": "token", "dr_grpo": "constant"}
ATTENTION = {name: name for name in ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")} | {
    "flash_attn": "flash_attention_2"
}
TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
SWIFT_REWARDS = {"format": "rollmatch.rewards.swift:format", "accuracy": "trl.rewards:accuracy_reward"}
"""Names that ms-swift registers -> what judges alike; TRL's reads the same column, by math_verify, too."""
DEFAULTS: dict[str, dict[str, object]] = {
    "trl": {"learning_rate": 1e-6, "num_generations": 8, "max_completion_length": 512, "temperature": 1.0,
            "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "bf16": True, "num_train_epochs": 3.0,
            "save_steps": 500, "save_total_limit": None, "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_mode": "sequence_mask"},
    "swift": {"learning_rate": 1e-4, "num_generations": 8, "max_completion_length": 512, "temperature": 0.9,
              "per_device_train_batch_size": 1, "num_train_epochs": 3.0, "lr_scheduler_type": "cosine",
              "weight_decay": 0.1, "adam_beta2": 0.95, "save_steps": 500, "save_total_limit": None, "beta": 0.04,
              "loss_type": "grpo", "rollout_importance_sampling_mode": None,
              "rollout_importance_sampling_threshold": 2.0, "tuner_type": "lora", "freeze_vit": True,
              "freeze_aligner": True},
}  # fmt: skip
"""Of the source, where ours differ and the run would: written out."""
LORA_DEFAULTS: dict[str, dict[str, object]] = {
    "trl": {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05},
    "swift": {"lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05},
}
SWIFT_BATCH = 16
"""Completions of an optimizer step of ms-swift where ``gradient_accumulation_steps`` is not given."""
PROMPT_ROOM = 512
"""Tokens for prompts where the source has no limit: the former default of both."""
NEEDED: dict[str, object] = {
    "model.model": "model",
    "custom.train_jsonl": "train.jsonl",
    "training.output_dir": "output",
    f"{GRPO}.rewards": [{"function": "rewards:right"}],
}
"""What every run needs -> an example."""
OF_ROWS = ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split")
DATASET = "custom.dataset.source"
"""Stands for both JSONL files."""
USED_TOGETHER = (
    "dataset_prompt_column",
    "per_device_train_batch_size",
    "steps_per_generation",
    "reward_funcs",
    "reward_weights",
    "vllm_server_host",
    "vllm_server_port",
    "rlhf_type",
    "use_peft",
    "max_prompt_length",
    "max_length",
    "truncation_strategy",
    "NPROC_PER_NODE",
    "CUDA_VISIBLE_DEVICES",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_mode",
    "rollout_importance_sampling_mode",
    "rollout_importance_sampling_threshold",
    "dynamic_sample",
    "max_resample_times",
)
SWIFT_ROUNDS = 3
"""ms-swift's ``max_resample_times`` where nothing is said."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "multi_objective_aggregation": ("sum_then_normalize",),
    "log_completions": (True,),
    "shuffle_dataset": (True,),
    "dataset_shuffle": (True,),
    "min_p": (0,),
    "use_hf": (True,),
    "do_train": (True,),
    "eval_strategy": ("no", "steps"),
    "save_strategy": ("steps",),
    "logging_strategy": ("steps",),
    "remove_unused_columns": (True,),
    "task_type": ("causal_lm", "CAUSAL_LM"),
    "bias": ("none",),
    "gradient_checkpointing_kwargs": ({"use_reentrant": False},),
    "lora_task_type": ("CAUSAL_LM",),
}
"""Values at which a key without counterpart says what happens here anyway."""
ON_BY_DEFAULT = ("shuffle_dataset", "dataset_shuffle", "train_dataloader_shuffle")
"""Keys without counterpart that false changes; false of others switches off what is not here."""
REASONS = {
    "external_plugins": "name their functions in reward_funcs as module.function",
    "generation_batch_size": "write steps_per_generation",
    "multi_turn_scheduler": "write an environment (custom.extra.environment)",
    "gym_env": "write an environment (custom.extra.environment)",
    "multi_objective_aggregation": "rewards are summed by weight, then compared",
    "resume_from_checkpoint": "use rollmatch train --resume",
    "deepspeed_config": "use deepspeed",
    "tools": "name them in environment.tools as module:function",
    "environment_factory": "name the class in environment.tools as module:Class",
    "rollout_func": "write an environment (custom.extra.environment)",
    "callbacks": "name them in training.callbacks as module:Class",
    "overwrite_output_dir": "use rollmatch train --overwrite",
    "push_to_hub": "use rollmatch export --push",
    "hub_model_id": "use rollmatch export --push",
    "hub_strategy": "use rollmatch export --push",
    "save_strategy": "save_steps counts steps",
    "use_liger_kernel": "nothing to set: logits are made in chunks",
    "padding_free": "done without it on GPUs, with model.attn_impl: packed",
    "dataset_prompt_column": "rename this column to prompt",
    "chat_template": "write it as chat_template.jinja in the model's directory",
    "NNODES": "use rollmatch train --nnodes",
    "NODE_RANK": "use rollmatch train --nnodes",
    "MASTER_ADDR": "use rollmatch train --nnodes",
    "MASTER_PORT": "use rollmatch train --nnodes",
    "PYTORCH_CUDA_ALLOC_CONF": "set it before rollmatch train, too",
}
