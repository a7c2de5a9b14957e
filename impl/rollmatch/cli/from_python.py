"""``rollmatch.train``: a run from a script or notebook, with records and reward functions in place of files and names.

from rollmatch import train

def right(answer, sample):
    return float(answer.strip() == sample.metadata["answer"])

train(
    {"model.model": "Qwen/Qwen3-0.6B", "training.output_dir": "runs/first", "training.max_steps": 100,
     "global_max_length": 1024, "custom.extra.rollout_matching.decoding.temperature": 1.0},
    train_data=[{"prompt": "What is 2 + 2?", "metadata": {"answer": "4"}}],
    rewards=[right],
)
"""

import importlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from rollmatch.cli.learner import train_config
from rollmatch.config.layers import merge, read_tree
from rollmatch.config.load import make
from rollmatch.config.yaml_dialect import Tree
from rollmatch.errors import ConfigError

Records = Iterable[Mapping[str, object]] | str | Path
"""Records of the JSONL format, or the path of such a file."""
WeightedReward = Callable[..., object] | tuple[Callable[..., object], float]


class RewardNotImportable(ConfigError):
    """A reward function has a name in its module, so that the run's files can say which one it was."""

    code = "reward-not-importable"


def train(
    config: Mapping[str, object] | str | Path,
    *,
    train_data: Records | None = None,
    val_data: Records | None = None,
    rewards: Sequence[WeightedReward] = (),
    existing: Literal["refuse", "resume", "overwrite"] = "refuse",
) -> Path:
    """Train, and return the run directory.

    ``config``: keys, nested or dotted, or a YAML file. ``train_data`` and ``val_data`` replace ``custom.train_jsonl``
    and ``custom.val_jsonl``; records are written beside the run directory (``-data``), and ``val_data`` defaults to
    ``train_data``. ``rewards``: functions in any form that the configuration accepts, or (function, weight); with
    them the variant defaults to grpo. ``existing``: what to do with a run in that directory.
    Under torchrun every rank calls this function.

    Errors: those of ``rollmatch train``, ``RewardNotImportable``; ``KeyboardInterrupt`` after a stopped run.
    """
    tree = read_tree(config) if isinstance(config, str | Path) else nested(config)
    if rewards:
        entries = [{"function": name_of(function), "weight": weight} for function, weight in map(_weighted, rewards)]
        tree = merge({"custom": {"trainer_variant": "grpo"}}, tree)
        tree = merge(tree, {"custom": {"extra": {"grpo": {"rewards": entries}}}})
    given = {"train": train_data, "val": val_data}
    files = {f"{split}_jsonl": _file_of(data, split, tree) for split, data in given.items() if data is not None}
    if "train_jsonl" in files:
        files.setdefault("val_jsonl", files["train_jsonl"])
    tree = merge(tree, {"custom": files})
    made = make(tree)
    if train_config(made, config_path="python", resume=existing == "resume", overwrite=existing == "overwrite"):
        raise KeyboardInterrupt
    return Path(made.training.output_dir)


def nested(keys: Mapping[str, object]) -> Tree:
    """Dotted keys as a tree; nested ones stay.

    >>> nested({"a.b": 1, "a": {"c": 2}, "a.d.e": 3})
    {'a': {'b': 1, 'c': 2, 'd': {'e': 3}}}
    """
    tree: Tree = {}
    for key, value in keys.items():
        for name in reversed(key.split(".")):
            value = {name: nested(value) if isinstance(value, Mapping) else value}
        tree = merge(tree, value)  # type: ignore[arg-type]
    return tree


def name_of(function: Callable[..., object]) -> str:
    """``module:name`` of a function. Errors: ``RewardNotImportable`` for one without a name of its own.

    >>> name_of(name_of)
    'rollmatch.cli.from_python:name_of'
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module is None or getattr(importlib.import_module(module), name, None) is not function:
        problem = f"{name or function!r} is not a name of module {module}"
        remedy = "Define the function at the top level of a module or of the script, with def."
        raise RewardNotImportable(problem, key="rewards", remedy=remedy)
    return f"{module}:{name}"


def _weighted(reward: WeightedReward) -> tuple[Callable[..., object], float]:
    return reward if isinstance(reward, tuple) else (reward, 1.0)


def _file_of(data: Records, split: str, tree: Tree) -> str:
    """A JSONL file of records; every rank writes the same."""
    if isinstance(data, str | Path):
        return str(data)
    directory = Path(f"{output_dir_of(tree)}-data")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{split}.jsonl"
    unfinished = path.with_suffix(f".{os.getpid()}")
    with unfinished.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in data)
    unfinished.replace(path)
    return str(path)


def output_dir_of(tree: Tree) -> str:
    """``training.output_dir``. Errors: ``ConfigError`` with ``missing-key``."""
    training = tree.get("training")
    found = training.get("output_dir") if isinstance(training, dict) else None
    if not isinstance(found, str | Path):
        problem = "this key is required"
        raise ConfigError(problem, code="missing-key", key="training.output_dir", remedy="Add it; it has no default.")
    return str(found)
