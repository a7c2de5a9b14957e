"""Unknown, removed and invalid keys as ``ConfigError``, with the key to use instead."""

from collections.abc import Mapping
from difflib import SequenceMatcher, get_close_matches
from types import MappingProxyType

from pydantic_core import ErrorDetails

from rollmatch.config.connection import RolloutServerConfig
from rollmatch.config.layers import SHORT, holds
from rollmatch.config.schema import fields
from rollmatch.config.training import FURTHER, NOT_USED
from rollmatch.config.yaml_dialect import Tree
from rollmatch.errors import ConfigError

ROLLOUT_MATCHING = "custom.extra.rollout_matching"
GRPO = "custom.extra.grpo"
_SERVER = "custom.extra.rollout_server"

REMOVED: Mapping[str, str] = MappingProxyType(
    {
        f"{ROLLOUT_MATCHING}.temperature": f"Use {ROLLOUT_MATCHING}.decoding.temperature.",
        f"{ROLLOUT_MATCHING}.top_p": f"Use {ROLLOUT_MATCHING}.decoding.top_p.",
        f"{ROLLOUT_MATCHING}.top_k": f"Use {ROLLOUT_MATCHING}.decoding.top_k.",
        f"{ROLLOUT_MATCHING}.rollout_buffer": "Remove it: asynchronous prefetch replaces it.",
        f"{ROLLOUT_MATCHING}.graphs_kept": "Remove it: overlap stream, which read it, is removed.",
        f"{ROLLOUT_MATCHING}.post_rollout_pack_scope": "Remove it: left-over segments are carried to the next row.",
        "training.packing_length": "Use global_max_length, which is the length of a packed row.",
        "rollout_matching": f"Move it to {ROLLOUT_MATCHING}.",
    }
)
"""Dotted key -> what to do instead."""
MISPLACED: Mapping[str, str] = MappingProxyType(
    {
        f"rlhf.{name}": f"Move it to {_SERVER}.{name}."
        for name in RolloutServerConfig.model_fields
        if name.startswith("vllm_")
    }
)
"""Engine settings under ``rlhf``, where ms-swift's learner ignores them."""
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("model_name_or_path", "name_or_path", "model_id", "model_path"), "model.model"),
        **dict.fromkeys(("dataset", "dataset_name", "train_dataset", "train_file"), "custom.train_jsonl"),
        **dict.fromkeys(("val_dataset", "eval_dataset", "validation_file"), "custom.val_jsonl"),
        **dict.fromkeys(("max_length", "max_seq_length", "max_seq_len", "cutoff_len"), "global_max_length"),
        **dict.fromkeys(("batch_size", "train_batch_size", "micro_batch_size"), "training.per_device_train_batch_size"),
        **dict.fromkeys(("torch_type", "dtype", "precision"), "model.torch_dtype"),
        **dict.fromkeys(("lora_r", "r"), "tuner.lora_rank"),
        **dict.fromkeys(("target_modules", "lora_target_modules"), "tuner.target_regex"),
        **dict.fromkeys(
            ("max_completion_length", "max_tokens", "max_response_length"), f"{ROLLOUT_MATCHING}.max_new_tokens"
        ),
        **dict.fromkeys(("group_size", "num_samples", "n", "num_return_sequences"), f"{GRPO}.num_generations"),
        **dict.fromkeys(("kl_coef", "kl_loss_coef", "kl_beta"), f"{GRPO}.beta"),
        **dict.fromkeys(("clip_range", "cliprange", "clip_ratio", "clip_eps"), f"{GRPO}.epsilon"),
        **{name: f"{ROLLOUT_MATCHING}.decoding.{name}" for name in ("temperature", "top_p", "top_k")},
        **dict.fromkeys(("reward_funcs", "reward_functions", "reward_weights"), f"{GRPO}.rewards"),
        **dict.fromkeys(("reward_func", "reward_model"), f"{GRPO}.rewards"),
        **dict.fromkeys(("truncation_strategy", "truncation_side", "max_prompt_length"), "overlong"),
        "attn_implementation": "model.attn_impl",
        **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "zero_stage"), "training.strategy"),
        "delta": f"{GRPO}.ratio_cap",
        "epochs": "training.num_train_epochs",
        "gradient_clipping": "training.max_grad_norm",
        "loss_type": f"{GRPO}.normalize",
        "lr": "training.learning_rate",
        "lr_scheduler": "training.lr_scheduler_type",
        "num_epochs": "training.num_train_epochs",
        "optimizer": "training.optim",
        "per_gpu_train_batch_size": "training.per_device_train_batch_size",
        "overlong_filter": f"{GRPO}.mask_truncated_completions",
        "system": "custom.prompts.system",
        "system_prompt": "custom.prompts.system",
        "tuner_type": "tuner.train_type",
    }
)
"""A key's name in TRL, ms-swift or other trainers -> our key."""
TRANSFORMERS = "training.extra_arguments"
_LENGTH = (
    "Remove it: responses have no length yet when samples are drawn, and the run keeps an order of its own to be "
    "resumed. packing, padding_free and tokens_per_micro_batch even out micro-batches instead."
)
_DEVICE = "Remove it: the GPUs that are visible are used. CUDA_VISIBLE_DEVICES= hides them."
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "data_files": "Use train and val, which name files where source is parquet, arrow, json or csv.",
        "split": "Use train and val, which name splits, such as train[:90%].",
        "warmup_ratio": "Write warmup_steps: a value below 1 is a share of all steps, such as 0.03.",
        "eval_strategy": "Set training.eval_steps; 0 evaluates before and after training only.",
        "evaluation_strategy": "Set training.eval_steps; 0 evaluates before and after training only.",
        "logging_strategy": "Set training.logging_steps.",
        "logging_dir": "Remove it: logs are in training.output_dir.",
        "overwrite_output_dir": "Remove it, and start with --overwrite.",
        "resume_from_checkpoint": "Remove it, and start with --resume.",
        "hub_token": "Remove it, and log in by `hf auth login`, or set HF_TOKEN: every checkpoint would hold it.",
        "group_by_length": _LENGTH,
        "train_sampling_strategy": _LENGTH,
        "length_column_name": _LENGTH,
        "no_cuda": _DEVICE,
        "use_cpu": _DEVICE,
        "use_mps_device": _DEVICE,
        "local_rank": "Remove it: torchrun says it in the environment.",
        "save_safetensors": "Remove it: checkpoints are safetensors.",
    }
)
"""A field of ``transformers.TrainingArguments``, of 4.x, too -> what to do instead."""


def find_removed(tree: Tree) -> list[ConfigError]:
    """All removed and misplaced keys a tree holds.

    >>> [error.key for error in find_removed({"training": {"packing_length": None, "seed": 1}})]
    ['training.packing_length']
    """
    removed = [
        ConfigError("this key is no longer supported", code="removed-key", key=key, remedy=remedy)
        for key, remedy in REMOVED.items()
        if holds(tree, key.split("."))
    ]
    return removed + [
        ConfigError("no server reads this key here", code="engine-setting-in-rlhf", key=key, remedy=remedy)
        for key, remedy in MISPLACED.items()
        if holds(tree, key.split("."))
    ]


def nearest(key: str) -> str | None:
    """The key that an unknown one stands for: the same name elsewhere, another trainer's name, or the closest spelling.

    >>> nearest("training.packing_bufer"), nearest("rlhf.num_generations"), nearest("training.zzz")
    ('training.packing_buffer', 'custom.extra.grpo.num_generations', None)
    >>> nearest("training.deepspeed"), nearest("rlhf.reward_funcs"), nearest("tuner.type")
    ('training.strategy', 'custom.extra.grpo.rewards', 'tuner.train_type')
    """
    section, _, name = key.rpartition(".")
    homes = {path: path.rpartition(".")[2] for path in fields()}
    if name not in homes.values() and name in OTHER_NAMES:
        return OTHER_NAMES[name]
    if name in FURTHER:
        return f"{TRANSFORMERS}.{name}"
    beside = [home for path, home in homes.items() if path.rpartition(".")[0] == section] + [
        *(SHORT if not section else ())
    ]
    if name not in homes.values():
        longer = [home for home in beside if home.endswith(f"_{name}")]
        close = longer if len(longer) == 1 else get_close_matches(name, beside)
        if close:
            return f"{section}.{close[0]}" if section else close[0]
    close = get_close_matches(name, sorted(set(homes.values())), cutoff=0.9)
    same = [path for path, home in homes.items() if close and home == close[0]]
    if close and f"{GRPO}.{close[0]}" in same:  # what other trainers name alike, such as beta, is theirs of GRPO
        return f"{GRPO}.{close[0]}"
    return max(same, key=lambda path: SequenceMatcher(None, key, path).ratio(), default=None)


_RANGE = ("out-of-range", "Choose a value in that range.")
_CODES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "missing": ("missing-key", "Add it; it has no default."),
        "stream_removed": ("not-a-choice", "Set it to ahead, which is faster, or to off."),
        "literal_error": ("not-a-choice", "Choose one of them."),
        "regex_white_space": ("regex-white-space", "Write it on one line, without YAML folding."),
        "regex_malformed": ("regex-malformed", "Correct the expression."),
        "reward_function": ("reward-malformed", "Write package.module:function."),
        "base_url_invalid": ("base-url-invalid", "Write scheme, host and port, such as http://127.0.0.1:8000."),
        "base_url_of_openai": ("base-url-invalid", "Name the server; routes are added to its address."),
        "host_invalid": ("host-invalid", "Write a name or an address; the port belongs into rlhf.vllm_server_port."),
        "greater_than": _RANGE,
        "greater_than_equal": _RANGE,
        "less_than": _RANGE,
        "less_than_equal": _RANGE,
        "finite_number": _RANGE,
        "string_too_short": _RANGE,
        "too_short": _RANGE,
        "out_of_range": _RANGE,
    }
)
"""pydantic's type of a finding -> our code and remedy; everything else is a wrong type."""
_EXPECTED = MappingProxyType(
    {"model_type": "must be a mapping", "dict_type": "must be a mapping", "tuple_type": "must be a list"}
)
SCALARS = ("int", "float", "bool")
"""How pydantic's types of findings begin whose values have no quotes in YAML."""
_LONGEST_VALUE = 60


def translate(found: ErrorDetails) -> ConfigError:
    """One finding of pydantic as one error; its key is the dotted path."""
    key = ".".join(str(part) for part in found["loc"])
    if found["type"] == "extra_forbidden":
        dotted = next((part for part in found["loc"] if "." in str(part)), None)
        return _unknown(key) if dotted is None else _dotted(key, str(dotted))
    code, remedy = _CODES.get(found["type"], ("wrong-type", "Write a value of that type."))
    if found["type"] == "model_type" and key.startswith(f"{GRPO}.rewards."):
        remedy = f"Write {{function: {found['input']}}}."
    elif key == "model" and isinstance(found["input"], str):
        remedy = f"Write model: {{model: {found['input']}}}."
    elif key == f"{GRPO}.rewards" and isinstance(found["input"], str):
        remedy = f"Write [{{function: {found['input']}}}]."
    elif code == "wrong-type" and isinstance(found["input"], str) and found["type"].startswith(SCALARS):
        remedy = "Write a value of that type; a number or a truth value has no quotes."
    if code == "missing-key":
        return ConfigError("this key is required", code=code, key=key, remedy=remedy)
    expected = _EXPECTED.get(found["type"], found["msg"].replace("Input should be", "must be"))
    return ConfigError(f"{expected}, but is {_shown(found['input'])}", code=code, key=key, remedy=remedy)


def _unknown(key: str) -> ConfigError:
    name = key.rpartition(".")[2]
    is_known = name in INSTEAD or name in NOT_USED
    meant = None if is_known else nearest(key)
    if is_known:
        remedy = INSTEAD.get(name, "Remove it: samples, losses and evaluations are not those of transformers.")
    elif meant is not None and meant.startswith(f"{TRANSFORMERS}."):
        remedy = f"Move it to {meant}."
    elif meant is not None:
        remedy = f"Did you mean {meant}?"
        if "." in meant and "." not in key:
            remedy += " rollmatch import-config converts a file of TRL or ms-swift."
    elif key.startswith("training."):
        remedy = f"Remove it, or move it to {TRANSFORMERS} if transformers.TrainingArguments has it."
    else:
        remedy = "Remove it; rollmatch schema lists all keys."
    return ConfigError("there is no such key", code="unknown-key", key=key, remedy=remedy)


def _dotted(key: str, name: str) -> ConfigError:
    first, _, rest = name.partition(".")
    problem = f"the key {name!r} is written with dots, which only --set reads"
    remedy = f"Write it as nested mappings: {first}: {{{rest.replace('.', ': {')}: ...{'}' * (1 + rest.count('.'))}"
    return ConfigError(problem, code="unknown-key", key=key, remedy=remedy)


def _shown(value: object) -> str:
    if value is None:
        return "null"
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
