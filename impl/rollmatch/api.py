"""A run from a script or notebook, with records and reward functions in place of files and names.

``train`` takes keys; ``GRPOTrainer``, ``VinePPOTrainer`` and ``VinePPOMCTSTrainer`` take arguments of TRL's trainers.

    from rollmatch import GRPOTrainer

    def right(answer, sample):
        return float(answer.strip() == sample.metadata["answer"])

    GRPOTrainer(
        "Qwen/Qwen3-0.6B",
        reward_funcs=right,
        train_dataset=[{"prompt": "What is 2 + 2?", "answer": "4"}],
        config={"training.output_dir": "runs/first", "training.max_steps": 100, "global_max_length": 1024,
                "custom.extra.rollout_matching.decoding.temperature": 1.0},
    ).train()
"""

import argparse
import hashlib
import importlib
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from rollmatch.config.layers import merge, nested, parse_overrides, read_tree
from rollmatch.config.load import make
from rollmatch.config.yaml_dialect import Tree
from rollmatch.errors import ConfigError, DataError
from rollmatch.launch.learner import train_config
from rollmatch.launch.server_arguments import overrides_of

Records = Iterable[Mapping[str, object]] | str | Path
"""Records (also a ``datasets.Dataset``; see ``record_of``), or the path of a JSONL file."""
WeightedReward = Callable[..., object] | tuple[Callable[..., object], float]
Config = Mapping[str, object] | str | Path
"""Keys, nested or dotted, or a YAML file."""
Existing = Literal["refuse", "resume", "overwrite"]
REWARDS = "custom.extra.grpo.rewards"
FIELDS = ("images", "objects", "width", "height", "metadata", "messages", "prompt", "system", "tools")


class RewardNotImportable(ConfigError):
    """A reward function has no name in its module by which the run's files could say which one it was."""

    code = "reward-not-importable"


class RecordNotJson(DataError):
    """A record holds something other than texts, numbers, lists and mappings; images are paths."""

    code = "record-not-json"


class GRPOTrainer:
    """A GRPO run by the arguments of TRL's ``GRPOTrainer``; files and ranks are those of ``rollmatch train``."""

    variant = "grpo"

    def __init__(  # noqa: PLR0913  # TRL's arguments, and those of verifiers
        self,
        model: str | Path,
        reward_funcs: Callable[..., object] | Sequence[WeightedReward] = (),
        *,
        train_dataset: Records,
        eval_dataset: Records | None = None,
        config: Config,
        use_vllm_server: bool = False,
        vllm_host: str | None = None,
        vllm_server_port: int | None = None,
        vllm_group_port: int | None = None,
        vllm_connection_timeout: float | None = None,
    ) -> None:
        """Nothing is loaded yet. ``model``: a directory or hub id. ``reward_funcs``: one, or ``rewards`` of ``train``.

        ``config``: all other keys. ``use_vllm_server`` generates on one rollout server, which the arguments after it
        name, as on the command line. Errors: ``ConfigError`` with ``given-twice``, ``server-not-used``.
        """
        tree = read_tree(config) if isinstance(config, str | Path) else nested(config)
        arguments = {"model.model": str(model), "custom.trainer_variant": self.variant}
        if use_vllm_server:
            arguments["custom.extra.rollout_matching.rollout_backend"] = "vllm"
        server = argparse.Namespace(
            use_vllm_server=use_vllm_server,
            vllm_host=vllm_host,
            vllm_server_port=vllm_server_port,
            vllm_group_port=vllm_group_port,
            vllm_connection_timeout=vllm_connection_timeout,
        )
        self.config = merge(_with_arguments(tree, arguments), parse_overrides(overrides_of(server)))
        self.rewards = [reward_funcs] if callable(reward_funcs) or isinstance(reward_funcs, str) else reward_funcs
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset

    def train(self, *, existing: Existing = "refuse") -> Path:
        """Train, and return the run directory. Errors: those of ``rollmatch.train``."""
        return train(
            self.config,
            train_data=self.train_dataset,
            val_data=self.eval_dataset,
            rewards=self.rewards,
            existing=existing,
        )


class VinePPOTrainer(GRPOTrainer):
    """A VinePPO run: values of steps by new continuations; keys below ``custom.extra.vineppo``."""

    variant = "vineppo"


class VinePPOMCTSTrainer(GRPOTrainer):
    """A VinePPO run whose continuations a search tree places; keys below ``custom.extra.vineppo``."""

    variant = "vineppo_mcts"


def train(
    config: Config,
    *,
    train_data: Records | None = None,
    val_data: Records | None = None,
    rewards: Sequence[WeightedReward] = (),
    existing: Existing = "refuse",
) -> Path:
    """Train, and return the run directory.

    ``config``: keys, nested or dotted, or a YAML file. ``train_data`` and ``val_data`` replace ``custom.train_jsonl``
    and ``custom.val_jsonl``; records are written beside the run directory (``-data``), into files that are named by
    their content; without ``val_data`` and ``custom.val_jsonl`` the run is not evaluated. ``rewards``:
    functions in any form that the configuration accepts, or (function, weight); with them the variant defaults to grpo.
    ``existing``: what to do with a run in that directory.
    Under torchrun every rank calls this function. In a thread, signals are left to the main thread.

    Errors: those of ``rollmatch train``, ``RewardNotImportable``, ``RecordNotJson``, ``given-twice``;
    ``KeyboardInterrupt`` after a stopped run.
    """
    if existing not in get_args(Existing):
        remedy = f"Choose one of {', '.join(get_args(Existing))}."
        raise ConfigError(f"is {existing!r}", code="not-a-choice", key="existing", remedy=remedy)
    tree = read_tree(config) if isinstance(config, str | Path) else nested(config)
    tree = _with_rewards(tree, rewards) if rewards else tree
    given = {"train": train_data, "val": val_data}
    files = {f"{split}_jsonl": _file_of(data, split, tree) for split, data in given.items() if data is not None}
    tree = merge(tree, {"custom": files})
    made = make(tree)
    if train_config(made, config_path="python", resume=existing == "resume", overwrite=existing == "overwrite"):
        raise KeyboardInterrupt
    return Path(made.training.output_dir)


def name_of(function: Callable[..., object]) -> str:
    """``module:name`` of a function. Errors: ``RewardNotImportable`` for one without a name of its own.

    >>> name_of(name_of)
    'rollmatch.api:name_of'
    """
    if isinstance(function, str):
        problem, remedy = f"{function!r} is a text", f"Pass the function itself, or name it in {REWARDS} of config."
        raise RewardNotImportable(problem, key="rewards", remedy=remedy)
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module is None or getattr(importlib.import_module(module), name, None) is not function:
        problem = f"{name or function!r} is not a name of module {module}"
        remedy = "Define the function at the top level of a module or of the script, with def."
        raise RewardNotImportable(problem, key="rewards", remedy=remedy)
    return f"{module}:{name}"


def _with_rewards(tree: Tree, rewards: Sequence[WeightedReward]) -> Tree:
    """The tree with reward functions. Errors: ``RewardNotImportable``, ``ConfigError`` with ``given-twice``."""
    if _at(tree, REWARDS):
        problem, remedy = "is set, and rewards are passed, too", "Leave one of the two out."
        raise ConfigError(problem, code="given-twice", key=REWARDS, remedy=remedy)
    entries = [{"function": name_of(function), "weight": weight} for function, weight in map(_weighted, rewards)]
    return merge(merge(nested({"custom.trainer_variant": "grpo"}), tree), nested({REWARDS: entries}))


def _weighted(reward: WeightedReward) -> tuple[Callable[..., object], float]:
    return reward if isinstance(reward, tuple) else (reward, 1.0)


def _file_of(data: Records, split: str, tree: Tree) -> str:
    """A JSONL file of records, named by its content: no other run's is written over. Every rank writes the same."""
    if isinstance(data, str | Path):
        return str(data)
    directory, digest = Path(f"{output_dir_of(tree)}-data"), hashlib.sha256()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        unfinished = Path(folder) / split
        with unfinished.open("wb") as file:
            for place, record in enumerate(data):
                line = _line_of(record, f"{split}_data[{place}]")
                digest.update(line)
                file.write(line)
        path = directory / f"{split}-{digest.hexdigest()}.jsonl"
        unfinished.replace(path)
    return str(path)


def record_of(row: Mapping[str, object]) -> dict[str, object]:
    """A row of a data set as a record: a chat below ``prompt`` is ``messages``, unknown columns are metadata.

    >>> record_of({"prompt": "1 + 1?", "answer": "2"})
    {'prompt': '1 + 1?', 'metadata': {'answer': '2'}}
    >>> record_of({"prompt": [{"role": "user", "content": "1 + 1?"}], "metadata": {"level": 3}})
    {'messages': [{'role': 'user', 'content': '1 + 1?'}], 'metadata': {'level': 3}}
    """
    record = {name: value for name, value in row.items() if name in FIELDS}
    columns = {name: value for name, value in row.items() if name not in FIELDS}
    if isinstance(record.get("prompt"), list):
        record = {("messages" if name == "prompt" else name): value for name, value in record.items()}
    given = record.get("metadata") or {}
    return record | {"metadata": given | columns} if columns and isinstance(given, dict) else record


def _line_of(row: Mapping[str, object], key: str) -> bytes:
    if not isinstance(row, Mapping):
        problem, remedy = f"is no mapping, but {row!r:.60}", "Give a list of records, such as [{'prompt': '1 + 1?'}]."
        raise RecordNotJson(problem, key=key, remedy=remedy)
    try:
        return f"{json.dumps(record_of(row), ensure_ascii=False)}\n".encode()
    except (TypeError, ValueError) as error:  # also half a character, and a record that contains itself
        remedy = "Give images as paths, or name the data set in custom.dataset, which reads images of a data set."
        raise RecordNotJson(str(error), key=key, remedy=remedy) from error


def _at(tree: Tree, key: str) -> object:
    """The value of a dotted key; None where there is none."""
    given: object = tree
    for name in key.split("."):
        given = given.get(name) if isinstance(given, dict) else None
    return given


def _with_arguments(tree: Tree, arguments: Mapping[str, str]) -> Tree:
    """The tree with the arguments of a trainer. Errors: ``ConfigError`` with ``given-twice``."""
    for key, value in arguments.items():
        given = _at(tree, key)
        if given not in (None, value):
            problem, remedy = f"is {given}, the trainer's argument is {value}", "Leave the key out of config."
            raise ConfigError(problem, code="given-twice", key=key, remedy=remedy)
    return merge(tree, nested(arguments))


def output_dir_of(tree: Tree) -> str:
    """``training.output_dir``. Errors: ``ConfigError`` with ``missing-key``."""
    found = _at(tree, "training.output_dir")
    if not isinstance(found, str):
        problem = "this key is required"
        raise ConfigError(problem, code="missing-key", key="training.output_dir", remedy="Add it; it has no default.")
    return found
