"""``rollmatch import-config``: a GRPO configuration of TRL or ms-swift as ours, and what has no counterpart.

Both count completions where we count prompts: ``per_device_train_batch_size`` is divided by the group size. The names
are in ``import_tables``.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import yaml

from rollmatch.config.connection import FIRST_GROUP_PORT
from rollmatch.config.dataset import SwiftId, from_modelscope, read_swift_id
from rollmatch.config.layers import nested
from rollmatch.config.load import make
from rollmatch.config.training import Reporter
from rollmatch.config.yaml_dialect import dump
from rollmatch.errors import ConfigError, ErrorList, RollmatchError
from rollmatch.interop.import_script import Unread
from rollmatch.interop.import_source import read_source
from rollmatch.interop.import_tables import (
    ATTENTION,
    DATASET,
    DEFAULTS,
    GRPO,
    LORA_DEFAULTS,
    MATCHING,
    NEEDED,
    NEUTRAL,
    NORMALIZE,
    OF_MODEL,
    OF_ROWS,
    ON_BY_DEFAULT,
    PROMPT_ROOM,
    REASONS,
    SERVER,
    SHARED,
    STRATEGIES,
    SWIFT,
    SWIFT_BATCH,
    SWIFT_REWARDS,
    SWIFT_ROUNDS,
    TRL,
    TRL_REWARDS,
    USED_TOGETHER,
    VLLM,
)


@dataclass(slots=True)
class Imported:
    """Our keys, dotted, and the source's keys that have no counterpart, each with a reason."""

    keys: dict[str, object] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    """The source's key -> what it is here."""
    sources: dict[str, str] = field(default_factory=dict)
    """Our key -> the source's key that set it."""

    @property
    def missing(self) -> list[str]:
        """Keys that every run needs, and that are not set."""
        given = {*self.keys, *(("custom.train_jsonl", "custom.val_jsonl") if DATASET in self.keys else ())}
        return [key for key in NEEDED if key not in given]

    def check(self) -> None:
        """Refuse what ``rollmatch check`` would, by the source's keys. Errors: ``ErrorList`` of ``ConfigError``."""
        try:
            make(nested({key: NEEDED[key] for key in self.missing} | self.keys))
        except ErrorList as found:
            raise ErrorList([self._of_source(error) for error in found.errors]) from None

    def _of_source(self, error: RollmatchError) -> RollmatchError:
        key = error.key
        while key and key not in self.sources:
            key = key.rpartition(".")[0]
        within = [name for ours, name in self.sources.items() if ours.startswith(f"{error.key}.")]
        name = self.sources.get(key) or next(iter(within), None)
        problem = error.problem if name is None else f"becomes {error.key}: {error.problem}"
        return ConfigError(problem, code=error.code, key=name or error.key, remedy=f"In the source: {error.remedy}")

    def notes(self) -> list[str]:
        """What is missing, was changed or was left out, as comments."""
        said = {
            "custom.train_jsonl": ("dataset", "dataset_name", "train_dataset"),
            f"{GRPO}.rewards": ("reward_funcs",),
        }
        said |= {"model.model": ("model_name_or_path",), "training.output_dir": ("output_dir",)}
        lines = [
            f"# not set here, and needed: {key}"
            for key in self.missing
            if not self.left_out.keys() & {*said.get(key, ())}
        ]
        lines += [f"# changed: {name}: {what}" for name, what in self.changed.items()]
        return [*lines, *(f"# left out: {name}: {reason}" for name, reason in self.left_out.items())]

    def text(self) -> str:
        """Our YAML below the notes."""
        return "\n".join([*self.notes(), dump(nested(self.keys))])


def import_config(options: argparse.Namespace) -> None:
    """Print or write our YAML, and nothing that ``check`` refuses.

    Errors: ``import-source-unreadable``, ``import-batch``, ``import-uneven``, and those of the configuration.
    """
    kind, fields = read_source(options.source)
    made = convert(kind, fields)
    made.check()
    text = made.text()
    if options.out:
        options.out.write_text(text, encoding="utf-8")
        print("\n".join([*made.notes(), f"wrote {options.out}; next: rollmatch check {options.out}"]))
    else:
        sys.stdout.write(text)


def convert(kind: str, fields: Mapping[str, object]) -> Imported:
    """Our keys for those of ``trl`` or ``swift``, with the source's defaults where ours differ."""
    unread = {name: REASONS.get(name, value) for name, value in fields.items() if isinstance(value, Unread)}
    of_rows = OF_ROWS if "train_dataset" in unread else ()  # of rows that the script makes of them
    fields = {
        name: _number(value)
        for name, value in fields.items()
        if name not in unread and name not in of_rows and (value is not None or name in DEFAULTS[kind])
    }
    given = _with_defaults(kind, fields)
    renamed = SHARED | (TRL if kind == "trl" else SWIFT)
    made = Imported({"custom.trainer_variant": "grpo"}, sources={ours: name for name, ours in renamed.items()})
    is_text = kind == "swift" and not _sees(str(given.get("model", "")))
    for name, value in given.items():
        before = dict(made.keys)
        if name in OF_VISION and is_text:
            made.left_out[name] = "the model has no vision tower"
        elif name in CONVERTED:
            CONVERTED[name](made, value)
        elif name in renamed:
            made.keys[renamed[name]] = value
        elif name not in USED_TOGETHER and not _is_neutral(name, value):
            made.left_out[name] = REASONS.get(name, "no counterpart")
        made.sources |= {key: name for key, one in made.keys.items() if key not in before or before[key] != one}
    _convert_batch(made, given)
    _convert_rewards(made, given, SWIFT_REWARDS if kind == "swift" else {"accuracy": SWIFT_REWARDS["accuracy"]})
    _convert_server(made, given)
    _convert_correction(made, given)
    if given.get("dynamic_sample"):
        made.keys[f"{GRPO}.dynamic_sampling"] = {"max_rounds": given.get("max_resample_times", SWIFT_ROUNDS)}
        made.sources[f"{GRPO}.dynamic_sampling"] = "dynamic_sample"
    if kind == "trl" and given.get("loss_type") == "cispo":
        made.left_out.pop("loss_type")
        _convert_cispo(made, given)
    _convert_lengths(made, given)
    if given.get("use_peft"):
        made.keys["tuner.train_type"] = "lora"
    if (column := given.get("dataset_prompt_column")) is not None:
        _convert_prompt_column(made, column)
    if kind == "swift" and given.get("torch_dtype") == "bfloat16":
        made.keys.setdefault("training.bf16", True)
    if kind == "swift" and not {"val_dataset", "split_dataset_ratio"} & fields.keys():
        made.keys.pop("training.eval_steps", None)
    if kind == "trl" or {"eval_strategy", "evaluation_strategy"} & fields.keys():  # ms-swift's follows from its data
        _convert_evaluation(made, fields)
    _convert_shares(made, given.get("max_steps"))
    unasked = DEFAULTS[kind].keys() - fields.keys()
    made.left_out = {name: reason for name, reason in made.left_out.items() if name not in unasked} | unread
    return made


_NUMBER = re.compile(r"[-+]?(\d+\.?|\d*\.\d+)[eE][-+]?\d+")


def _number(value: object) -> object:
    """A number that YAML 1.1 reads as a text.

    >>> _number("1e-6"), _number("v1"), _number(["5E-7"])
    (1e-06, 'v1', ['5E-7'])
    """
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _convert_lengths(made: Imported, given: Mapping[str, object]) -> None:
    """ms-swift's ``max_length`` limits prompts here; without a limit, the engine's length holds both."""
    limit, longest = given.get("max_prompt_length") or given.get("max_length"), made.keys.get(f"{VLLM}.max_model_len")
    name = "max_prompt_length" if given.get("max_prompt_length") else "max_length"
    room = _size(limit or PROMPT_ROOM, name) + _size(given["max_completion_length"], "max_completion_length")
    if longest is not None and limit is None:
        name = made.sources[f"{VLLM}.max_model_len"]
        room = _size(longest, name)
    if longest is not None and _size(longest, made.sources[f"{VLLM}.max_model_len"]) >= room:
        made.keys.pop(f"{VLLM}.max_model_len")
    made.keys["global_max_length"], made.sources["global_max_length"] = room, name
    if given.get("max_prompt_length") is not None or given.get("truncation_strategy") == "left":
        made.keys["overlong"] = "truncate_left"
    elif given.get("max_length") is not None:
        made.keys["overlong"] = "skip"


def _convert_prompt_column(made: Imported, column: object) -> None:
    """open-r1's name for the column of questions."""
    if DATASET in made.keys:
        made.keys["custom.dataset.columns"] = {"prompt": column}
    else:
        made.left_out["dataset_prompt_column"] = REASONS["dataset_prompt_column"]


def _convert_evaluation(made: Imported, fields: Mapping[str, object]) -> None:
    """Both evaluate only where ``eval_strategy`` says so; YAML reads ``no`` as false."""
    if fields.get("eval_strategy", fields.get("evaluation_strategy")) not in (None, False, "no"):
        return
    for name in ("training.eval_steps", "custom.val_jsonl"):
        made.keys.pop(name, None)
    if DATASET in made.keys:
        made.keys["custom.dataset.val"] = None


def _convert_shares(made: Imported, max_steps: object) -> None:
    """A number of steps below 1 is a share of all, which ``max_steps`` says."""
    for name in ("save_steps", "eval_steps", "logging_steps"):
        share = made.keys.get(f"training.{name}")
        if not isinstance(share, float) or share >= 1:
            continue
        if isinstance(max_steps, int) and max_steps > 0:
            made.keys[f"training.{name}"] = math.ceil(share * max_steps)
        else:
            del made.keys[f"training.{name}"]
            made.left_out[name] = f"{share} is a share of all steps; write a number of steps"


def _is_neutral(name: str, value: object) -> bool:
    """Whether a key without counterpart has a value that changes nothing.

    >>> _is_neutral("push_to_hub", False), _is_neutral("shuffle_dataset", False), _is_neutral("min_p", 0.1)
    (True, False, False)
    """
    is_off = value is None or (value is False and name not in ON_BY_DEFAULT)
    return is_off or value in NEUTRAL.get(name, ())


def _with_defaults(kind: str, fields: Mapping[str, object]) -> dict[str, object]:
    given = DEFAULTS[kind] | ({"bf16": False} if fields.get("fp16") else {}) | dict(fields)  # TRL's is the other one
    if given.get("use_peft") or (given.get("train_type") or given.get("tuner_type")) == "lora":
        given = LORA_DEFAULTS[kind] | given
    if kind == "swift" and "model" in given:
        given = {"output_dir": f"output/{str(given['model']).rstrip('/').rpartition('/')[2]}"} | given
    if "train_type" in fields:  # the older name of ms-swift's tuner_type
        given.pop("tuner_type", None)
    if kind == "swift" and given.get("gradient_accumulation_steps") is None:
        size = _size(given["per_device_train_batch_size"], "per_device_train_batch_size")
        given["gradient_accumulation_steps"] = -(-SWIFT_BATCH // size)
    return given


OF_VISION = ("freeze_vit", "freeze_aligner")
_SEES = re.compile(r"vl|omni|vision|llava|gemma-?3", re.IGNORECASE)


def _sees(model: str) -> bool:
    """Whether a model may have a vision tower: by its config.json, or by the name of a hub id.

    >>> _sees("Qwen/Qwen2.5-VL-7B-Instruct"), _sees("Qwen/Qwen2.5-7B-Instruct")
    (True, False)
    """
    path = Path(model) / "config.json"
    if path.is_file():
        return "vision_config" in json.loads(path.read_text(encoding="utf-8"))
    return "/" not in model or _SEES.search(model.rpartition("/")[2]) is not None


def _convert_correction(made: Imported, given: Mapping[str, object]) -> None:
    """The importance weight for engine and learner: all of TRL's, and ms-swift's ``token_truncate``."""
    is_on = given.get("vllm_importance_sampling_correction")
    mode, cap = given.get("vllm_importance_sampling_mode"), given.get("vllm_importance_sampling_cap")
    cap, key = cap or given.get("vllm_importance_sampling_clip_max"), "vllm_importance_sampling_mode"
    if "rollout_importance_sampling_mode" in given:
        mode, key = given["rollout_importance_sampling_mode"], "rollout_importance_sampling_mode"
        is_on, cap = mode is not None, given["rollout_importance_sampling_threshold"]
    low = given.get("vllm_importance_sampling_clip_min")
    made.sources |= {f"{GRPO}.correction": key, f"{GRPO}.correction_cap": key}
    if not is_on or (mode == "token_truncate" and low is None):
        made.keys[f"{GRPO}.correction_cap"] = cap if is_on else None
    elif key.startswith("vllm"):
        level, _, how = str(mode).partition("_")
        made.keys[f"{GRPO}.correction"] = {"level": level, "mode": how, "low": low, "high": cap}
    else:
        made.keys[f"{GRPO}.correction_cap"] = cap
        made.left_out[key] = f"{mode} has no counterpart; correction_cap truncates the weight of each token"


def _convert_cispo(made: Imported, given: Mapping[str, object]) -> None:
    """TRL bounds the ratio by ``epsilon_high`` itself, we by 1 more, and neither reads ``epsilon``."""
    made.keys.pop(f"{GRPO}.epsilon", None)
    made.keys |= {f"{GRPO}.clip": "cispo", f"{GRPO}.normalize": "token"}
    high = given.get("epsilon_high")
    if isinstance(high, int | float) and high > 1:
        made.keys[f"{GRPO}.epsilon_high"] = high - 1
    else:
        made.keys.pop(f"{GRPO}.epsilon_high", None)
        made.left_out["epsilon_high"] = "with cispo, TRL bounds the ratio by it; write more than 1"


def _convert_batch(made: Imported, given: Mapping[str, object]) -> None:
    """Completions per micro-batch to prompts; micro-batches per generation to optimizer steps."""
    size, accumulation, group = (
        _size(given[name], name)
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    )
    fewer = group // math.gcd(size * accumulation, group)
    if fewer > 1:
        made.changed["gradient_accumulation_steps"] = (
            f"{accumulation * fewer} where it was {accumulation}: a process had {size} x {accumulation} completions, "
            f"and takes whole groups of {group} here. {_fewer_processes(fewer, given)}"
        )
    total = size * accumulation * fewer
    prompts, steps = (size // group, accumulation) if size % group == 0 else (1, total // group)
    made.keys |= {"training.per_device_train_batch_size": prompts, "training.gradient_accumulation_steps": steps}
    if given.get("steps_per_generation"):
        each = _size(given["steps_per_generation"], "steps_per_generation")
        if each % accumulation:
            made.left_out["steps_per_generation"] = "no whole number of optimizer steps"
        made.keys[f"{GRPO}.steps_per_generation"] = max(1, each // accumulation)


def _fewer_processes(fewer: int, given: Mapping[str, object]) -> str:
    num = given.get("NPROC_PER_NODE")
    rest = f"{num // fewer} of {num}" if isinstance(num, int) and num % fewer == 0 else f"{fewer} times fewer"
    return f"Train by {rest} processes for as many completions per step"


def _convert_rewards(made: Imported, given: Mapping[str, object], registered: Mapping[str, str]) -> None:
    """``registered``: names without a module, and what judges alike."""
    if (names := given.get("reward_funcs")) is None:
        return
    listed = [str(name) for name in (names if isinstance(names, list) else [names])]
    named = given.get("reward_weights")
    weights = [1.0] * len(listed) if named is None else named if isinstance(named, list) else [named]
    _check_even(listed, weights, key="reward_weights")
    functions = {name: _function_of(name) or registered.get(name) for name in listed}
    entries = [{"function": functions[name], "weight": weight} for name, weight in zip(listed, weights)]
    if known := [entry for entry in entries if entry["function"] is not None]:
        made.keys[f"{GRPO}.rewards"] = known
        made.sources |= {f"{GRPO}.rewards": "reward_funcs"}
        made.sources |= {f"{GRPO}.rewards.{place}.weight": "reward_weights" for place in range(len(known))}
    if unknown := [name for name in listed if functions[name] is None]:
        made.left_out["reward_funcs"] = f"write {', '.join(unknown)} as module:function"


def _function_of(name: str) -> str | None:
    """``module:function``; None where the name does not say it.

    >>> _function_of("think_format_reward"), _function_of("my.rewards.right"), _function_of("cosine")
    ('trl.rewards:think_format_reward', 'my.rewards:right', None)
    """
    if name in TRL_REWARDS:
        return f"trl.rewards:{name}"
    module, _, function = name.rpartition(".")
    is_named = all(part.isidentifier() for part in name.split("."))
    return f"{module}:{function}" if module and is_named else None


def _convert_server(made: Imported, given: Mapping[str, object]) -> None:
    """Host and port as an address; ms-swift names several by lists."""
    port = given.get("vllm_server_port")
    if f"{SERVER}.base_url" in made.keys:
        made.keys.setdefault(f"{SERVER}.group_port", FIRST_GROUP_PORT)
        return
    mode, is_named = given.get("vllm_mode"), port is not None or "vllm_server_host" in given
    if mode == "colocate" or not (is_named or mode == "server"):
        made.keys.pop(f"{SERVER}.group_port", None)  # read with servers only
        return
    ports = port if isinstance(port, list) else [8000 if port is None else port]
    host = given.get("vllm_server_host", "127.0.0.1")
    hosts = host if isinstance(host, list) else [host] * len(ports)
    _check_even(hosts, ports, key="vllm_server_port")
    urls = [f"http://{'127.0.0.1' if one == '0.0.0.0' else one}:{p}" for one, p in zip(hosts, ports)]
    made.keys[f"{SERVER}.base_url"] = urls[0] if len(urls) == 1 else urls
    named_by = next((one for one in ("vllm_server_port", "vllm_server_host") if one in given), "vllm_mode")
    made.sources[f"{SERVER}.base_url"] = named_by
    if f"{SERVER}.group_port" not in made.keys:
        made.sources[f"{SERVER}.group_port"] = named_by
    first = made.keys.pop(f"{SERVER}.group_port", FIRST_GROUP_PORT)
    listed = (
        first
        if isinstance(first, list)
        else [_whole(first, made.sources[f"{SERVER}.group_port"]) + place for place in range(len(urls))]
    )
    made.keys[f"{SERVER}.group_port"] = listed[0] if len(urls) == 1 else listed


def _to(key: str, change: Callable[[object], object] = lambda value: value) -> Callable[[Imported, object], None]:
    """A conversion to one key."""
    return lambda made, value: made.keys.update({key: change(value)})


def _set_normalize(made: Imported, value: object) -> None:
    if str(value) in NORMALIZE:
        made.keys[f"{GRPO}.normalize"] = NORMALIZE[str(value)]
    else:
        made.left_out["loss_type"] = f"{value} has no counterpart; {', '.join(NORMALIZE)} have"


def _set_reporters(made: Imported, value: object) -> None:
    named = value if isinstance(value, list) else [value]
    if kept := [name for name in named if name in get_args(Reporter)]:
        made.keys["training.report_to"] = kept
    if others := [str(name) for name in named if name not in kept]:
        made.left_out["report_to"] = f"{', '.join(others)} has no counterpart; {', '.join(get_args(Reporter))} have"


def _set_system(made: Imported, value: object) -> None:
    """ms-swift reads the file that it names."""
    if not value:
        return
    if not str(value).endswith(".txt"):
        made.keys["custom.prompts.system"] = value
    elif Path(str(value)).is_file():
        made.keys["custom.prompts.system"] = Path(str(value)).read_text(encoding="utf-8")
    else:
        made.left_out["system"] = f"write the text of {value} in custom.prompts.system"


def _set_thinking(made: Imported, value: object) -> None:
    if value is not None:
        made.keys["model.chat_template_kwargs.enable_thinking"] = value


def _set_importance(made: Imported, value: object) -> None:
    if value in ("token", "sequence"):
        made.keys[f"{GRPO}.importance"] = value
    else:
        made.left_out["importance_sampling_level"] = f"{value} has no counterpart; token and sequence have"


def _set_warmup(made: Imported, value: object) -> None:
    """A share of all steps; without it, ``warmup_steps`` stands."""
    if value:
        made.keys["training.warmup_steps"] = value


def _set_attention(made: Imported, value: object) -> None:
    if str(value) in ATTENTION:
        made.keys["model.attn_impl"] = ATTENTION[str(value)]
    elif value is not None:
        made.left_out["attn_implementation"] = f"{value} has no counterpart; {', '.join(ATTENTION)} have"


def _set_adapter(made: Imported, value: object) -> None:
    paths = value if isinstance(value, list) else [value]
    if len(paths) == 1:
        made.keys["model.adapter"] = paths[0]
    elif paths:
        made.left_out["adapters"] = "name one"


def _set_baseline(made: Imported, value: object) -> None:
    known = {"grpo": "mean", "rloo": "leave_one_out"}
    if str(value) in known:
        made.keys[f"{GRPO}.baseline"] = known[str(value)]
    else:
        made.left_out["advantage_estimator"] = f"{value} has no counterpart; {', '.join(known)} have"


def _set_targets(made: Imported, value: object) -> None:
    """Names of modules; TRL's examples write commas between them."""
    names = value if isinstance(value, list) else [value]
    if names != ["all-linear"]:
        made.keys["tuner.target_regex"] = regex_of(names)


def regex_of(names: Sequence[object]) -> str:
    """What finds modules by their names; a comma at a name's end is the shell's leaving.

    >>> regex_of(["q_proj,", "v_proj"])
    '.*\\\\.(q_proj|v_proj)'
    """
    return rf".*\.({'|'.join(str(name).rstrip(',') for name in names)})"


def _set_model(made: Imported, value: object) -> None:
    """Arguments of ``from_pretrained``, which a YAML may hold as a text of JSON."""
    given = yaml.safe_load(value) if isinstance(value, str) else value
    for name, one in given.items() if isinstance(given, dict) else ():
        if name == "attn_implementation":
            _set_attention(made, one)
        elif one is not None and name in OF_MODEL:
            made.keys[OF_MODEL[name]] = str(one).removeprefix("torch.") if "dtype" in name else one
        elif one:
            made.left_out[f"model_init_kwargs.{name}"] = "no counterpart"


def _to_data(key: str, name: str) -> Callable[[Imported, object], None]:
    """One JSONL file, which is what ``key`` takes."""

    def set_data(made: Imported, value: object) -> None:
        paths = value if isinstance(value, list) else [value]
        swift = read_swift_id(str(paths[0])) if name == "dataset" and len(paths) == 1 else None
        if swift is not None and swift.source.endswith(".jsonl"):
            made.keys[key] = swift.source
            if swift.take is not None:
                made.left_out[name] = f"all records are used; head -n {swift.take} {swift.source} writes the first"
        elif len(paths) == 1 and str(paths[0]).endswith(".jsonl"):
            made.keys[key] = str(paths[0])
        elif swift is not None and "/" in swift.source and not Path(swift.source).suffix:
            made.keys |= {f"custom.dataset.{part}": one for part, one in swift.keys.items()}
            made.keys |= {"custom.dataset.columns": {"prompt": "prompt"}, "custom.dataset.val": None}
            made.left_out[name] = _notes_on(swift)
        elif name == "dataset_name" and value is not None:
            made.keys |= {DATASET: value, "custom.dataset.columns": {"prompt": "prompt"}}
            made.keys.setdefault("custom.dataset.val", "test")
        else:
            made.left_out[name] = "write the data set as one JSONL with prompt or messages per line"

    return set_data


def _notes_on(swift: SwiftId) -> str:
    """What ms-swift does by itself, and has to be said here."""
    notes = ["name the column of questions in custom.dataset.columns.prompt"]
    if swift.take is not None:
        notes.append(f"the first {swift.take} records are used, where ms-swift draws them")
    if swift.is_modelscope:
        notes.append(f"it is on ModelScope: {from_modelscope(swift.source)}")
    return "; ".join(notes)


def _set_strategy(made: Imported, value: object) -> None:
    if str(value) in STRATEGIES or str(value).endswith(".json"):
        made.keys["training.strategy"] = STRATEGIES.get(str(value), value)
    else:
        made.left_out["deepspeed"] = f"{value} has no counterpart; {', '.join(STRATEGIES)} and a JSON file have"


CONVERTED: dict[str, Callable[[Imported, object], None]] = {
    "use_vllm": _to(f"{MATCHING}.rollout_backend", lambda value: "vllm" if value else "hf"),
    "vllm_mode": _to(f"{MATCHING}.vllm.mode"),
    "loss_type": _set_normalize,
    "importance_sampling_level": _set_importance,
    "scale_rewards": _to(
        f"{GRPO}.scale_rewards", lambda value: {"True": "group", "False": "none"}.get(str(value), value)
    ),
    "top_k": _to(f"{MATCHING}.decoding.top_k", lambda value: value or -1),
    "warmup_ratio": _set_warmup,
    "mask_truncated_completions": _to(f"{GRPO}.mask_truncated_completions"),
    "overlong_filter": _to(f"{GRPO}.mask_truncated_completions"),
    "vllm_enable_sleep_mode": _to(f"{VLLM}.sleep_level", lambda value: int(bool(value))),
    "sleep_level": _to(f"{VLLM}.sleep_level", lambda value: min(_whole(value, "sleep_level"), 1)),
    "attn_implementation": _set_attention,
    "attn_impl": _set_attention,
    "adapters": _set_adapter,
    "report_to": _set_reporters,
    "system": _set_system,
    "system_prompt": _set_system,
    "enable_thinking": _set_thinking,
    "advantage_estimator": _set_baseline,
    "lora_target_modules": _set_targets,
    "target_modules": _set_targets,
    "dataset": _to_data("custom.train_jsonl", "dataset"),
    "dataset_name": _to_data("custom.train_jsonl", "dataset_name"),
    "val_dataset": _to_data("custom.val_jsonl", "val_dataset"),
    "deepspeed": _set_strategy,
    "model_init_kwargs": _set_model,
    "max_tool_calling_iterations": _to(
        "custom.extra.environment.max_turns", lambda value: _whole(value, "max_tool_calling_iterations") + 1
    ),
}


def _check_even(ones: Sequence[object], others: Sequence[object], *, key: str) -> None:
    if len(ones) != len(others):
        problem, remedy = f"has {len(others)} values for {len(ones)}", "Name as many."
        raise ConfigError(problem, code="import-uneven", key=key, remedy=remedy)


def _size(value: object, name: str) -> int:
    if (size := _whole(value, name)) < 1:
        raise ConfigError(f"is {size}", code="import-batch", key=name, remedy="Write 1 or more, or leave it out.")
    return size


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        problem, remedy = f"is {value!r}, not a whole number", "Write one, or leave it out."
        raise ConfigError(problem, code="import-batch", key=name, remedy=remedy)
    return value
