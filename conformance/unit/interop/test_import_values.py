"""Each value of TRL's and ms-swift's arguments that is converted, and what it becomes."""

import pytest

from rollmatch.interop.import_config import GRPO, MATCHING, SERVER, convert

ON_BY_DEFAULT = (("trl", "shuffle_dataset"), ("swift", "dataset_shuffle"), ("swift", "train_dataloader_shuffle"))
NEUTRAL = {
    "multi_objective_aggregation": ["sum_then_normalize"],
    "log_completions": [True], "shuffle_dataset": [True], "dataset_shuffle": [True], "min_p": [0], "use_hf": [True],
    "do_train": [True], "eval_strategy": ["steps"], "save_strategy": ["steps"], "logging_strategy": ["steps"],
    "remove_unused_columns": [True], "task_type": ["causal_lm", "CAUSAL_LM"], "bias": ["none"],
    "lora_task_type": ["CAUSAL_LM"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fields", "key", "value", "left_out"),
    [
        ("trl", {"warmup_ratio": 0.0}, "training.warmup_steps", None, None),
        ("trl", {"vllm_enable_sleep_mode": False}, f"{MATCHING}.vllm.sleep_level", 0, None),
        ("swift", {"sleep_level": 0}, f"{MATCHING}.vllm.sleep_level", 0, None),
        ("swift", {"sleep_level": 1}, f"{MATCHING}.vllm.sleep_level", 1, None),
        ("trl", {"top_k": 5}, f"{MATCHING}.decoding.top_k", 5, None),
        ("swift", {"adapters": []}, "model.adapter", None, None),
        ("swift", {"adapters": "a"}, "model.adapter", "a", None),
        ("swift", {"advantage_estimator": "grpo"}, f"{GRPO}.baseline", "mean", None),
        ("swift", {"advantage_estimator": "gae"}, f"{GRPO}.baseline", None, "advantage_estimator"),
        ("trl", {"loss_type": "dapo"}, f"{GRPO}.normalize", "token", None),
        ("trl", {"loss_type": "bnpo"}, f"{GRPO}.normalize", None, "loss_type"),
        ("trl", {"scale_rewards": True}, f"{GRPO}.scale_rewards", "group", None),
        ("trl", {"scale_rewards": "batch"}, f"{GRPO}.scale_rewards", "batch", None),
        ("trl", {"attn_implementation": None}, "model.attn_impl", None, None),
        ("trl", {"lora_target_modules": "all-linear"}, "tuner.target_regex", None, None),
        ("trl", {"lora_target_modules": "q"}, "tuner.target_regex", r".*\.(q)", None),
        ("trl", {"use_peft": True}, "tuner.train_type", "lora", None),
        ("trl", {"use_peft": False}, "tuner.train_type", None, None),
        ("swift", {"train_type": "full"}, "tuner.train_type", "full", None),
        ("swift", {"train_type": "full"}, "tuner.lora_rank", None, None),
        ("swift", {"dataset": "a.jsonl"}, "custom.train_jsonl", "a.jsonl", None),
        ("swift", {"dataset": ["a.json"]}, "custom.train_jsonl", None, "dataset"),
        ("swift", {"val_dataset": ["v.jsonl"]}, "custom.val_jsonl", "v.jsonl", None),
        ("trl", {"dataset_name": "a.jsonl"}, "custom.train_jsonl", "a.jsonl", None),
        ("trl", {"dataset_name": "hub/x"}, "custom.dataset.val", None, None),
        ("trl", {"dataset_name": "a.jsonl", "dataset_prompt_column": "q"}, "x", None, "dataset_prompt_column"),
        ("trl", {"lora_target_modules": ["q,", "v"]}, "tuner.target_regex", r".*\.(q|v)", None),
        ("trl", {"save_steps": 0.05, "max_steps": 30}, "training.save_steps", 2, None),
        ("trl", {"save_steps": 0.05}, "training.save_steps", None, "save_steps"),
        ("trl", {"eval_steps": 0.5, "eval_strategy": "steps"}, "training.eval_steps", None, "eval_steps"),
        ("trl", {"eval_steps": 0.5}, "training.eval_steps", None, None),
        ("trl", {"reward_funcs": ["format"]}, f"{GRPO}.rewards", None, "reward_funcs"),
        ("trl", {"dataset_name": None}, "custom.dataset.source", None, "dataset_name"),
        *((kind, {name: False}, name, None, name) for kind, name in ON_BY_DEFAULT),
        ("trl", {name: value for name, values in NEUTRAL.items() for value in values}, "min_p", None, None),
        ("trl", {"eval_strategy": "no"}, "eval_strategy", None, None),
        ("trl", {"eval_strategy": "epoch"}, "eval_strategy", None, "eval_strategy"),
        ("trl", {"vllm_importance_sampling_correction": False}, f"{GRPO}.correction_cap", None, None),
        ("trl", {}, f"{GRPO}.correction", {"level": "sequence", "mode": "mask", "low": None, "high": 3.0}, None),
        (
            "trl",
            {
                "vllm_importance_sampling_cap": 5.0,
                "vllm_importance_sampling_mode": "token_truncate",
                "vllm_importance_sampling_clip_min": 0.5,
            },
            f"{GRPO}.correction",
            {"level": "token", "mode": "truncate", "low": 0.5, "high": 5.0},
            None,
        ),
        ("trl", {"entropy_coef": 0.01}, f"{GRPO}.entropy_coef", 0.01, None),
        ("swift", {"top_entropy_quantile": 0.2}, f"{GRPO}.top_entropy_share", 0.2, None),
        *(
            ("trl", {"importance_sampling_level": one}, f"{GRPO}.importance", one, None)
            for one in ("token", "sequence")
        ),
        (
            "swift",
            {"importance_sampling_level": "sequence_token"},
            f"{GRPO}.importance",
            None,
            "importance_sampling_level",
        ),
        ("trl", {"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.2}, f"{GRPO}.epsilon_high", 4.0, None),
        ("trl", {"loss_type": "cispo", "epsilon_high": 5.0}, f"{GRPO}.clip", "cispo", None),
        ("trl", {"loss_type": "cispo", "epsilon": 0.2}, f"{GRPO}.epsilon", None, "epsilon_high"),
        ("swift", {"loss_type": "cispo", "epsilon_high": 5.0}, f"{GRPO}.clip", None, "loss_type"),
        ("trl", {"vllm_importance_sampling_mode": "token_truncate"}, f"{GRPO}.correction_cap", 3.0, None),
        ("swift", {"rollout_importance_sampling_mode": "token_truncate"}, f"{GRPO}.correction_cap", 2.0, None),
        (
            "swift",
            {"rollout_importance_sampling_mode": "token_mask"},
            f"{GRPO}.correction_cap",
            2.0,
            "rollout_importance_sampling_mode",
        ),
        ("trl", {"vllm_server_port": [1, 2], "vllm_group_port": 7}, f"{SERVER}.group_port", [7, 8], None),
        ("trl", {"vllm_server_port": [1, 2], "vllm_group_port": [7, 9]}, f"{SERVER}.group_port", [7, 9], None),
        ("trl", {"vllm_server_port": 1, "vllm_group_port": [7]}, f"{SERVER}.group_port", 7, None),
        (
            "trl",
            {"vllm_server_base_url": "http://x:1", "vllm_server_port": 2},
            f"{SERVER}.base_url",
            "http://x:1",
            None,
        ),
        ("trl", {}, f"{SERVER}.base_url", None, None),
        (
            "swift",
            {"per_device_train_batch_size": 6, "num_generations": 6},
            "training.gradient_accumulation_steps",
            3,
            None,
        ),
        (
            "trl",
            {"reward_funcs": "right"},
            f"{GRPO}.rewards",
            None,
            "reward_funcs",
        ),
        (
            "swift",
            {"reward_funcs": ["cosine", "format", "accuracy"], "reward_weights": [1, 2, 3]},
            f"{GRPO}.rewards",
            [
                {"function": "rollmatch.rewards.swift:format", "weight": 2},
                {"function": "trl.rewards:accuracy_reward", "weight": 3},
            ],
            "reward_funcs",
        ),
        ("swift", {"max_length": 7, "max_completion_length": 5}, "global_max_length", 12, None),
        ("swift", {"max_length": 7, "truncation_strategy": "left"}, "overlong", "truncate_left", None),
        ("swift", {"max_length": 7}, "overlong", "skip", None),
        ("swift", {"max_length": 7, "vllm_max_model_len": 600}, f"{MATCHING}.vllm.max_model_len", None, None),
        ("swift", {"max_length": 700, "vllm_max_model_len": 600}, f"{MATCHING}.vllm.max_model_len", 600, None),
        ("swift", {"vllm_max_model_len": 9000}, "global_max_length", 9000, None),
        ("swift", {"report_to": ["wandb", "swanlab"]}, "training.report_to", ["wandb"], "report_to"),
        ("trl", {"fp16": True}, "training.extra_arguments.fp16", True, None),
        ("swift", {"report_to": "swanlab"}, "training.report_to", None, "report_to"),
        ("swift", {"enable_thinking": False}, "model.chat_template_kwargs.enable_thinking", False, None),
        ("swift", {"system": "none/prompt.txt"}, "custom.prompts.system", None, "system"),
        ("swift", {"system": "Be brief."}, "custom.prompts.system", "Be brief.", None),
        ("swift", {"torch_dtype": "bfloat16"}, "training.bf16", True, None),
        ("swift", {"torch_dtype": "bfloat16", "bf16": False}, "training.bf16", False, None),
        ("swift", {"eval_steps": 9}, "training.eval_steps", None, None),
        ("swift", {"eval_steps": 9, "val_dataset": "v.jsonl"}, "training.eval_steps", 9, None),
        ("swift", {"vllm_mode": "colocate", "vllm_server_host": "h"}, f"{SERVER}.base_url", None, None),
    ],
)
def test_a_value_becomes_ours_or_is_left_out_by_name(kind, fields, key, value, left_out):
    made = convert(kind, fields)
    assert made.keys.get(key) == value
    assert made.left_out.keys() - convert(kind, {}).left_out.keys() == ({left_out} if left_out else set())
