"""``rollmatch import-config``: a GRPO configuration of TRL or ms-swift as ours, and what has no counterpart.

Both count completions where we count prompts: ``per_device_train_batch_size`` is divided by the group size. Sources:
TRL 1.10 ``trainer/grpo_config.py``, ``trainer/model_config.py``; ms-swift 4.6 ``arguments/rlhf_args.py``.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rollmatch.cli.from_python import nested
from rollmatch.cli.processes import shell_line
from rollmatch.config.connection import FIRST_GROUP_PORT
from rollmatch.config.training import TRAINER_KEYS
from rollmatch.errors import ConfigError

GRPO, MATCHING = "custom.extra.grpo", "custom.extra.rollout_matching"
SERVER = f"{MATCHING}.vllm.server"
TRAINING = (*TRAINER_KEYS, "eval_steps", "report_to", "gradient_checkpointing")
TUNER = ("use_dora", "use_rslora", "lora_alpha", "lora_dropout", "freeze_vit", "freeze_llm", "freeze_aligner")
SHARED = {name: f"training.{name}" for name in TRAINING} | {
    "num_generations": f"{GRPO}.num_generations",
    "num_iterations": f"{GRPO}.num_iterations",
    "epsilon": f"{GRPO}.epsilon",
    "epsilon_high": f"{GRPO}.epsilon_high",
    "delta": f"{GRPO}.ratio_cap",
    "beta": f"{GRPO}.beta",
    "max_completion_length": f"{MATCHING}.max_new_tokens",
    "repetition_penalty": f"{MATCHING}.repetition_penalty",
    "temperature": f"{MATCHING}.decoding.temperature",
    "top_p": f"{MATCHING}.decoding.top_p",
    "vllm_gpu_memory_utilization": f"{MATCHING}.vllm.gpu_memory_utilization",
    "vllm_tensor_parallel_size": f"{MATCHING}.vllm.tensor_parallel_size",
    "vllm_server_timeout": f"{SERVER}.timeout_s",
    "vllm_group_port": f"{SERVER}.group_port",
    "vllm_server_group_port": f"{SERVER}.group_port",
    "vllm_server_base_url": f"{SERVER}.base_url",
    **{name: f"tuner.{name}" for name in TUNER},
}
TRL = {"model_name_or_path": "model.model", "dtype": "model.torch_dtype", "torch_dtype": "model.torch_dtype",
       "lora_r": "tuner.lora_rank",
       "attn_implementation": "model.attn_impl", "chat_template_kwargs": "model.chat_template_kwargs"}  # fmt: skip
SWIFT = {"model": "model.model", "torch_dtype": "model.torch_dtype", "lora_rank": "tuner.lora_rank",
         "max_length": "global_max_length", "system": "custom.prompts.system",
         "attn_impl": "model.attn_impl",
         "tuner_type": "tuner.train_type", "train_type": "tuner.train_type"}  # fmt: skip
STRATEGIES = {"zero2": "deepspeed_zero2", "zero3": "deepspeed_zero3"}
NORMALIZE = {"grpo": "sequence", "dapo": "token", "dr_grpo": "constant"}
TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
DEFAULTS = {
    "trl": {"learning_rate": 1e-6, "num_generations": 8, "max_completion_length": 512, "temperature": 1.0,
            "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "bf16": True},
    "swift": {"learning_rate": 1e-4, "num_generations": 8, "max_completion_length": 512, "temperature": 0.9,
              "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
}  # fmt: skip
"""Of the source, where ours differ: written out."""
PROMPT_ROOM = 512
"""Tokens for prompts where the source has no limit: the former default of both."""
NEEDED = ("model.model", "custom.train_jsonl", "custom.val_jsonl", "training.output_dir", f"{GRPO}.rewards")
USED_TOGETHER = (
    *("per_device_train_batch_size", "steps_per_generation", "reward_funcs"),
    *("reward_weights", "vllm_server_host", "vllm_server_port", "rlhf_type", "use_peft", "max_prompt_length"),
)


class SourceUnreadable(ConfigError):
    """A YAML of TRL or ms-swift, or a command line that begins with swift or trl, is given."""

    code = "import-source-unreadable"


@dataclass(slots=True)
class Imported:
    """Our keys, dotted, and the source's keys that have no counterpart, each with a reason."""

    keys: dict[str, object] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Our YAML; what is missing and what was left out stand above it as comments."""
        lines = [f"# not set here, and needed: {key}" for key in NEEDED if key not in self.keys]
        lines += [f"# left out: {name}: {reason}" for name, reason in self.left_out.items()]
        return "\n".join([*lines, yaml.safe_dump(nested(self.keys), sort_keys=False, allow_unicode=True)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    text = "a YAML of TRL or ms-swift, or a command line after --, such as -- swift rlhf --rlhf_type grpo ..."
    parser.add_argument("source", nargs="+", metavar="SOURCE", help=text)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to this file instead of stdout")


def import_config(options: argparse.Namespace) -> None:
    """Print or write our YAML. Errors: ``SourceUnreadable``, ``import-batch``, ``import-uneven``."""
    kind, fields = read_source(options.source)
    text = convert(kind, fields).text()
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


def read_source(words: Sequence[str]) -> tuple[str, dict[str, object]]:
    """(``trl`` or ``swift``, keys) of a command line or a YAML. Errors: ``SourceUnreadable``."""
    if words[0] in ("swift", "trl"):
        fields = read_words(words[2:])
        inner = fields.pop("config", None)
        return words[0], (_read_yaml(str(inner)) if inner else {}) | fields
    if len(words) > 1:
        problem = f"{shell_line(words, {})} begins with neither swift nor trl"
        raise SourceUnreadable(problem, key="SOURCE", remedy="Give one YAML, or the whole command after --.")
    fields = _read_yaml(words[0])
    return ("swift" if "rlhf_type" in fields or "model" in fields else "trl"), fields


def read_words(words: Sequence[str]) -> dict[str, object]:
    """Options of a command line; values are read as YAML.

    >>> read_words(["--beta", "0.04", "--reward_funcs", "a", "b", "--use_vllm", "--epsilon=0.3"])
    {'beta': 0.04, 'reward_funcs': ['a', 'b'], 'use_vllm': True, 'epsilon': 0.3}
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, is_joined, value = word[2:].partition("=")
            found[name] = [value] if is_joined else []
        elif name:
            found[name].append(word)
        else:
            raise SourceUnreadable(f"{word} follows no option", key="SOURCE", remedy="Write --name value.")
    read = {name: [yaml.safe_load(value) for value in values] for name, values in found.items()}
    return {name: True if not values else values[0] if len(values) == 1 else values for name, values in read.items()}


def _read_yaml(path: str) -> dict[str, object]:
    try:
        fields = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SourceUnreadable(f"{path}: {error}", key="SOURCE", remedy="Give a readable YAML file.") from error
    if not isinstance(fields, dict):
        raise SourceUnreadable(f"{path} holds no keys", key="SOURCE", remedy="Give a YAML of key: value lines.")
    return fields


def convert(kind: str, fields: Mapping[str, object]) -> Imported:
    """Our keys for those of ``trl`` or ``swift``."""
    given = DEFAULTS[kind] | dict(fields)
    renamed = SHARED | (TRL if kind == "trl" else SWIFT)
    made = Imported(keys={"custom.trainer_variant": "grpo"})
    for name, value in given.items():
        if name in CONVERTED:
            CONVERTED[name](made, value)
        elif name in renamed:
            made.keys[renamed[name]] = value
        elif name not in USED_TOGETHER:
            made.left_out[name] = "no counterpart"
    _convert_batch(made, given)
    _convert_rewards(made, given)
    _convert_server(made, given)
    room = _whole(given.get("max_prompt_length", PROMPT_ROOM)) + _whole(given["max_completion_length"])
    made.keys.setdefault("global_max_length", room)
    if given.get("use_peft"):
        made.keys["tuner.train_type"] = "lora"
    return made


def _convert_batch(made: Imported, given: Mapping[str, object]) -> None:
    """Completions per micro-batch to prompts; micro-batches per generation to optimizer steps."""
    size, accumulation, group = (
        _whole(given[name])
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    )
    if size * accumulation % group:
        problem = f"{size} x {accumulation} completions a step are no whole number of groups of {group}"
        raise ConfigError(problem, code="import-batch", key="per_device_train_batch_size", remedy="Change one of them.")
    prompts, steps = (size // group, accumulation) if size % group == 0 else (1, size * accumulation // group)
    made.keys |= {"training.per_device_train_batch_size": prompts, "training.gradient_accumulation_steps": steps}
    if each := given.get("steps_per_generation"):
        if _whole(each) % accumulation:
            made.left_out["steps_per_generation"] = "no whole number of optimizer steps"
        made.keys[f"{GRPO}.steps_per_generation"] = max(1, _whole(each) // accumulation)


def _convert_rewards(made: Imported, given: Mapping[str, object]) -> None:
    if (names := given.get("reward_funcs")) is None:
        return
    listed = [str(name) for name in (names if isinstance(names, list) else [names])]
    named = given.get("reward_weights")
    weights = [1.0] * len(listed) if named is None else named if isinstance(named, list) else [named]
    _check_even(listed, weights, key="reward_weights")
    made.keys[f"{GRPO}.rewards"] = [
        {"function": _function_of(name), "weight": weight} for name, weight in zip(listed, weights, strict=True)
    ]
    if unknown := [name for name in listed if ":" not in _function_of(name)]:
        made.left_out["reward_funcs"] = f"write {', '.join(unknown)} as module:function"


def _function_of(name: str) -> str:
    """``module:function`` where the name says both.

    >>> _function_of("think_format_reward"), _function_of("my.rewards.right"), _function_of("accuracy")
    ('trl.rewards:think_format_reward', 'my.rewards:right', 'accuracy')
    """
    if name in TRL_REWARDS:
        return f"trl.rewards:{name}"
    module, _, function = name.rpartition(".")
    return f"{module}:{function}" if module else name


def _convert_server(made: Imported, given: Mapping[str, object]) -> None:
    """Host and port as an address; ms-swift names several by lists."""
    port = given.get("vllm_server_port")
    if f"{SERVER}.base_url" in made.keys or (port is None and "vllm_server_host" not in given):
        return
    ports = port if isinstance(port, list) else [8000 if port is None else port]
    host = given.get("vllm_server_host", "127.0.0.1")
    hosts = host if isinstance(host, list) else [host] * len(ports)
    _check_even(hosts, ports, key="vllm_server_port")
    urls = [f"http://{'127.0.0.1' if one == '0.0.0.0' else one}:{p}" for one, p in zip(hosts, ports, strict=True)]
    made.keys[f"{SERVER}.base_url"] = urls[0] if len(urls) == 1 else urls
    first = made.keys.pop(f"{SERVER}.group_port", FIRST_GROUP_PORT)
    listed = first if isinstance(first, list) else [_whole(first) + place for place in range(len(urls))]
    made.keys[f"{SERVER}.group_port"] = listed[0] if len(urls) == 1 else listed


def _to(key: str, change: Callable[[object], object] = lambda value: value) -> Callable[[Imported, object], None]:
    """A conversion to one key."""
    return lambda made, value: made.keys.update({key: change(value)})


def _set_normalize(made: Imported, value: object) -> None:
    if value in NORMALIZE:
        made.keys[f"{GRPO}.normalize"] = NORMALIZE[str(value)]
    else:
        made.left_out["loss_type"] = f"{value} has no counterpart; {', '.join(NORMALIZE)} have"


def _set_targets(made: Imported, value: object) -> None:
    names = value if isinstance(value, list) else [value]
    if names != ["all-linear"]:
        made.keys["tuner.target_regex"] = rf".*\.({'|'.join(map(str, names))})"


def _to_data(key: str, name: str) -> Callable[[Imported, object], None]:
    """One JSONL file, which is what ``key`` takes."""

    def set_data(made: Imported, value: object) -> None:
        paths = value if isinstance(value, list) else [value]
        if len(paths) == 1 and str(paths[0]).endswith(".jsonl"):
            made.keys[key] = str(paths[0])
        else:
            made.left_out[name] = "write the data set as one JSONL with prompt or messages per line"

    return set_data


def _set_strategy(made: Imported, value: object) -> None:
    if value in STRATEGIES or str(value).endswith(".json"):
        made.keys["training.strategy"] = STRATEGIES.get(str(value), value)
    else:
        made.left_out["deepspeed"] = f"{value} has no counterpart; {', '.join(STRATEGIES)} and a JSON file have"


CONVERTED: dict[str, Callable[[Imported, object], None]] = {
    "use_vllm": _to(f"{MATCHING}.rollout_backend", lambda value: "vllm" if value else "hf"),
    "vllm_mode": _to(f"{MATCHING}.vllm.mode"),
    "loss_type": _set_normalize,
    "scale_rewards": _to(
        f"{GRPO}.scale_rewards", lambda value: {"True": "group", "False": "none"}.get(str(value), value)
    ),
    "top_k": _to(f"{MATCHING}.decoding.top_k", lambda value: value or -1),
    "warmup_ratio": _to("training.warmup_steps"),
    "mask_truncated_completions": _to(f"{GRPO}.mask_truncated_completions"),
    "overlong_filter": _to(f"{GRPO}.mask_truncated_completions"),
    "vllm_importance_sampling_correction": _to(f"{GRPO}.correction_cap", lambda value: 2.0 if value else None),
    "lora_target_modules": _set_targets,
    "target_modules": _set_targets,
    "dataset": _to_data("custom.train_jsonl", "dataset"),
    "dataset_name": _to_data("custom.train_jsonl", "dataset_name"),
    "val_dataset": _to_data("custom.val_jsonl", "val_dataset"),
    "deepspeed": _set_strategy,
}


def _check_even(ones: Sequence[object], others: Sequence[object], *, key: str) -> None:
    if len(ones) != len(others):
        problem, remedy = f"has {len(others)} values for {len(ones)}", "Name as many."
        raise ConfigError(problem, code="import-uneven", key=key, remedy=remedy)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"is {value!r}, not a whole number", code="import-batch", key="SOURCE", remedy="Correct it.")
    return value
