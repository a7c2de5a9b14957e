"""Defaults of the keys that the oracle reads, from the reference, and keys as a tree."""

R, G, T, V = "custom.extra.rollout_matching", "custom.extra.grpo", "training", "custom.extra.vineppo"
E, D = "custom.extra.environment", "custom.extra.distill"
_DEFAULTS = {
    "overlong": "error",
    "tuner": {"train_type": "full", "lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.0, "use_dora": False}
    | {"rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}
    | {"freeze_llm": False, "freeze_vit": False, "freeze_aligner": False},
    "custom.prompts": {"system": "", "user": ""},
    R: {"rollout_generate_batch_size": 1, "max_new_tokens": 512, "repetition_penalty": 1.0, "overlap": "off"}
    | {"candidate_top_k": 10, "maskiou_gate": 0.3, "maskiou_resolution": 256, "fp_cost": 1.0, "fn_cost": 1.0}
    | {"target_sigma": 2.0, "target_truncate": None, "temperature_coord": 1.0, "soft_ce_weight": 1.0}
    | {"w1_weight": 1.0, "gate_weight": 0.0, "desc_ce_weight": 1.0, "desc_ce_weight_matched": 0.0, "eval_iou": 0.5},
    f"{R}.decoding": {"temperature": 0.0, "top_p": 1.0, "top_k": -1},
    G: {"num_generations": 8, "steps_per_generation": 1, "num_iterations": 1, "baseline": "mean", "beta": 0.0}
    | {"scale_rewards": "group", "mask_truncated_completions": False, "normalize": "token", "epsilon": 0.2}
    | {"epsilon_high": None, "ratio_cap": None, "old_logprobs": "recomputed", "correction_cap": 2.0}
    | {"eval_temperature": 0.0, "importance": "token", "clip": "ppo", "entropy_coef": 0.0, "top_entropy_share": 1.0},
    V: {"num_continuations": 9, "first_continuations": None, "siblings": "none", "steps": "lines", "step_tokens": 100}
    | {"step_probability": 0.9, "step_every": 5, "answer_mark": "", "max_steps": None, "normalization": "whiten"}
    | {"unfinished_return": 0.0},
    D: {
        "teachers": [],
        "loss": "sampled",
        "beta": None,
        "top_k": None,
        "lmbda": 1.0,
        "answers": None,
        "environment_weight": 0.0,
    },
    f"{V}.search": {"num_rounds": 4, "num_per_round": 8, "num_least": 3},
    T: {"seed": 42, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "learning_rate": 1e-5}
    | {"lr_scheduler_type": "linear", "warmup_steps": 0.0, "weight_decay": 0.0, "max_grad_norm": 1.0}
    | {"optim": "adamw_torch", "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "packing": False}
    | {"eval_scenes": None, "eval_steps": 0},
}
DEFAULTS = {
    (f"{section}.{name}" if isinstance(values, dict) else section): value
    for section, values in _DEFAULTS.items()
    for name, value in (values.items() if isinstance(values, dict) else [("", values)])
}


def below(keys, section):
    """The keys of a section, by their last name."""
    return {name[len(section) + 1 :]: value for name, value in keys.items() if name.startswith(f"{section}.")}


def tree_of(keys):
    """Dotted keys as a tree."""
    tree = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree
