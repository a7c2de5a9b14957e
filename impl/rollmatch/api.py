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
import inspect
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from rollmatch.config.layers import merge, nested, parse_overrides, read_tree, value_at
from rollmatch.config.load import load_config, make
from rollmatch.config.yaml_dialect import Tree
from rollmatch.environments.tool_class import ToolFactory
from rollmatch.environments.tools import load_class
from rollmatch.errors import ConfigError, DataError, LaunchError
from rollmatch.interop.passed import name_passed
from rollmatch.interop.trl_arguments import check_others, keys_of_args, keys_of_defaults, keys_of_peft
from rollmatch.journal import read_journal
from rollmatch.launch.learner import train_config
from rollmatch.launch.server_arguments import overrides_of
from rollmatch.rewards.environments import get_reward
from rollmatch.run.directory import JOURNAL, RESOLVED, last_checkpoint

if TYPE_CHECKING:
    from accelerate import PartialState
    from torch import nn
    from transformers import TrainerState

Records = Iterable[Mapping[str, object]] | str | Path
"""Records as a JSONL file has them (also a ``datasets.Dataset``), or the path of such a file."""
WeightedReward = Callable[..., object] | tuple[Callable[..., object], float]
Config = Mapping[str, object] | str | Path
"""Keys, nested or dotted, or a YAML file."""
Existing = Literal["refuse", "resume", "overwrite"]
REWARDS, OF_TOOLS = "custom.extra.grpo.rewards", "custom.extra.environment"


class RewardNotImportable(ConfigError):
    """A reward is no function."""

    code = "reward-not-importable"


class RecordNotJson(DataError):
    """A record holds something other than texts, numbers, lists, mappings and pictures."""

    code = "record-not-json"


class AttributeUnknown(ConfigError, AttributeError):
    """A script asks a trainer for what TRL's has and ours has not."""

    code = "attribute-unknown"


class GRPOTrainer:
    """A GRPO run by the arguments of TRL's ``GRPOTrainer``; files and ranks are those of ``rollmatch train``."""

    variant = "grpo"
    left_out: Mapping[str, str] = MappingProxyType({})
    """Fields of ``args`` without a counterpart -> why."""

    def __init__(  # noqa: PLR0913  # TRL's arguments, and those of verifiers
        self,
        model: str | Path,
        reward_funcs: Callable[..., object] | Sequence[WeightedReward] = (),
        args: object | None = None,
        train_dataset: Records | None = None,
        eval_dataset: Records | None = None,
        processing_class: object | None = None,
        callbacks: Sequence[object] | None = None,
        peft_config: object | None = None,
        tools: Sequence[Callable[..., object]] | None = None,
        environment_factory: Callable[[], object] | None = None,
        *,
        config: Config | None = None,
        use_vllm_server: bool = False,
        vllm_host: str | None = None,
        vllm_server_port: int | None = None,
        vllm_group_port: int | None = None,
        vllm_connection_timeout: float | None = None,
        **others: object,
    ) -> None:
        """Nothing is loaded yet. ``model``: a directory or hub id. ``reward_funcs``: one, or ``rewards`` of ``train``.

        ``args``: TRL's GRPOConfig; ``per_device_train_batch_size`` counts completions there, prompts in our keys.
        Its defaults are taken where neither ``args`` nor ``config`` is passed.
        ``config``: our keys, which win. ``peft_config``: a ``LoraConfig``. ``processing_class``: that of the model.
        ``callbacks``: of transformers. ``tools``: functions that turns call. ``environment_factory``: a
        class whose methods turns call, or what makes an instance; without ``train_dataset`` its ``reset`` shows every
        prompt. ``use_vllm_server`` generates on one rollout server, which the arguments after it name, as on the
        command line. Errors: ``ConfigError`` with ``given-twice``, ``server-not-used``, ``argument-unknown``.
        """
        check_others(others, [*inspect.signature(GRPOTrainer).parameters][:-1])  # the last are others
        if not isinstance(model, str | Path):
            problem, remedy = f"is {type(model).__name__}", "Pass its directory or hub id: engine and learner load it."
            raise ConfigError(problem, code="argument-unknown", key="model", remedy=remedy)
        tokenizer = getattr(processing_class, "tokenizer", processing_class)  # a processor holds one
        if processing_class is not None and str(getattr(tokenizer, "name_or_path", "")) != str(model):
            problem, remedy = "is not that of the model", "Save it with the model, and name that directory."
            raise ConfigError(problem, code="argument-unknown", key="processing_class", remedy=remedy)
        called = [name_of(one) for one in _as_list(tools, "tools")]
        called += [] if environment_factory is None else [name_of(_as_class(environment_factory))]
        if train_dataset is None and environment_factory is None:
            problem, remedy = "is missing", "Pass records, a datasets.Dataset, or the path of a JSONL file."
            raise ConfigError(problem, code="missing-key", key="train_dataset", remedy=remedy)
        tree: Tree = {}
        if args is not None or config is None:
            keys, self.left_out = keys_of_args(args) if args is not None else keys_of_defaults(str(model))
            if called:  # TRL's limit is that of all turns, of which there may be any number
                keys[f"{OF_TOOLS}.max_response_tokens"] = keys["custom.extra.rollout_matching.max_new_tokens"]
                keys.setdefault(f"{OF_TOOLS}.max_turns", keys[f"{OF_TOOLS}.max_response_tokens"])
            tree = nested({key: value for key, value in keys.items() if key != "custom.trainer_variant"})
        if peft_config is not None:
            tree = merge(tree, nested(keys_of_peft(peft_config)))
        if config is not None:
            tree = merge(tree, _tree_of(config))
        if called:
            tree = _with_arguments(tree, {f"{OF_TOOLS}.tools": called})
        self.callbacks = [*_as_list(callbacks, "callbacks")]
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
        self.rewards = _weighted(_entries_of(reward_funcs, "reward_funcs"), getattr(args, "reward_weights", None))
        if (own := load_class(called)) is not None and own.has_reward:
            self.rewards.append((get_reward, 1.0))
        self.train_dataset = _as_records(
            _of_environment(self.config) if train_dataset is None else train_dataset, "train_dataset"
        )
        self.eval_dataset = _as_records(eval_dataset, "eval_dataset")

    def __getattr__(self, name: str) -> NoReturn:
        """Errors: ``AttributeUnknown``."""
        remedy = "A trainer has config, train, state, model, evaluate, save_model and add_callback."
        remedy = "Use rollmatch export RUN OUT --push NAME." if name == "push_to_hub" else remedy
        raise AttributeUnknown(f"there is no {name}", key=f"{type(self).__name__}.{name}", remedy=remedy)

    def add_callback(self, callback: object) -> None:
        """A ``transformers.TrainerCallback``, or a class of it."""
        self.callbacks.append(callback)

    def train(self, resume_from_checkpoint: bool | None = None, *, existing: Existing = "refuse") -> Path:
        """Train, and return the run directory. Errors: those of ``rollmatch.train``.

        ``resume_from_checkpoint=True`` is ``existing="resume"``: from the newest whole checkpoint of ``output_dir``.
        """
        if not isinstance(resume_from_checkpoint, bool | None):
            problem, remedy = f"is {resume_from_checkpoint!r}", "Pass True: the newest whole checkpoint is taken."
            raise ConfigError(problem, code="argument-unknown", key="resume_from_checkpoint", remedy=remedy)
        existing = "resume" if resume_from_checkpoint else existing
        for name, reason in self.left_out.items():
            print(f"  args.{name} is left out: {reason}")  # noqa: T201  # what a script sets and nothing uses
        named = {"training.callbacks": [name_of(one) for one in self.callbacks]} if self.callbacks else {}
        self.directory = train(
            merge(self.config, nested(named)),
            train_data=self.train_dataset,
            val_data=self.eval_dataset,
            rewards=self.rewards,
            existing=existing,
        )
        return self.directory

    def end(self) -> None:
        """Nothing is left to do: a run closes its trackers. TRL's scripts call it last."""

    @property
    def accelerator(self) -> "PartialState":
        """accelerate's state of this process; TRL's scripts print by it."""
        from accelerate import PartialState

        return PartialState()

    @property
    def state(self) -> "TrainerState":
        """transformers' state, as of the newest checkpoint."""
        from transformers import TrainerState

        return TrainerState.load_from_json(str(self._checkpoint() / "trainer_state.json"))

    @property
    def model(self) -> "nn.Module":
        """The policy of the newest checkpoint, read from its files."""
        from rollmatch.run.export import load_trained

        checkpoint = self._checkpoint()
        return load_trained(load_config(str(checkpoint.parent / RESOLVED)), checkpoint)

    def evaluate(self) -> dict[str, float]:
        """Metrics of the run's last evaluation, which it makes at its end, by ``eval_`` names.

        Errors: ``nothing-to-evaluate``.
        """
        events = [one for one in read_journal(self._checkpoint().parent / JOURNAL) if one["event"] == "evaluated"]
        if not events:
            problem, remedy = "the run has no held-out samples", "Pass eval_dataset."
            raise LaunchError(problem, code="nothing-to-evaluate", key="eval_dataset", remedy=remedy)
        return {f"eval_{name}": value for name, value in events[-1]["metrics"].items()}

    def save_model(
        self, output_dir: str | Path | None = None, *, dtype: str | None = None, adapter: bool = False
    ) -> None:
        """Write the newest checkpoint as a model, as ``rollmatch export`` does; by default beside the run's files.

        ``dtype``: of the weights, by default that of the model which was trained. ``adapter``: the adapter alone, as
        TRL writes it. Errors: as there."""
        from rollmatch.run.export import export

        run = self._checkpoint().parent
        options = {"dtype": dtype, "adapter": adapter, "checkpoint": None, "push": None, "verify": False}
        export(argparse.Namespace(run=run, out=Path(output_dir or run), **options))

    def _checkpoint(self) -> Path:
        """Errors: ``checkpoint-missing``, before training."""
        directory = Path(output_dir_of(self.config))
        found = last_checkpoint(directory) if directory.is_dir() else None
        if found is None:
            problem, remedy = f"{directory} holds no checkpoint", "Call train() first."
            raise LaunchError(problem, code="checkpoint-missing", key="training.output_dir", remedy=remedy)
        return found


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
    tree, listed = _tree_of(config), _entries_of(rewards, "rewards")
    tree = _with_rewards(tree, listed) if listed else tree
    given = {"train": _as_records(train_data, "train_data"), "val": _as_records(val_data, "val_data")}
    files = {f"{split}_jsonl": _file_of(data, split, tree) for split, data in given.items() if data is not None}
    tree = merge(tree, {"custom": files})
    made = make(tree)
    if train_config(made, config_path="python", resume=existing == "resume", overwrite=existing == "overwrite"):
        raise KeyboardInterrupt
    return Path(made.training.output_dir)


def _tree_of(config: Config) -> Tree:
    if isinstance(config, str | Path):
        return read_tree(config)
    if not isinstance(config, Mapping):
        raise _of_type(config, "config", "Pass a mapping of keys, or the path of a YAML file.")
    return nested(config)


def _entries_of(rewards: object, key: str) -> list[tuple[Callable[..., object], float]]:
    """Functions with their weights. Errors: ``RewardNotImportable``, ``ConfigError`` with ``argument-unknown``."""
    listed = [rewards] if callable(rewards) or isinstance(rewards, str) else _as_list(rewards, key)
    entries = [one if isinstance(one, tuple) else (one, 1.0) for one in listed]
    for one in entries:
        if len(one) != 2 or not (callable(one[0]) or isinstance(one[0], str) or hasattr(one[0], "funcs")):
            raise _of_type(one[0] if len(one) == 2 else one, key, "Pass functions, or (function, weight).")
        if isinstance(one[0], str):
            problem = f"{one[0]!r} is a text; reward models are not loaded here"
            remedy = f"Pass a function that calls the model, or name a function in {REWARDS} of config."
            raise RewardNotImportable(problem, key=key, remedy=remedy)
    return entries


def _weighted(
    entries: list[tuple[Callable[..., object], float]], weights: Sequence[float] | None
) -> list[tuple[Callable[..., object], float]]:
    """Functions with the weights that ``args`` holds in their order. Errors: ``import-uneven``."""
    if weights is None:
        return entries
    if len(weights) != len(entries):
        problem, remedy = f"has {len(weights)} values for {len(entries)} functions", "Name as many."
        raise ConfigError(problem, code="import-uneven", key="args.reward_weights", remedy=remedy)
    return [(function, float(weight)) for (function, _), weight in zip(entries, weights, strict=True)]


def _as_list(given: object, key: str) -> Sequence[Any]:
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise _of_type(given, key, "Pass a list.")
    return given


def _as_class(environment_factory: object) -> object:
    """What is named among tools. Errors: ``argument-unknown``."""
    if not callable(environment_factory):
        remedy = "Pass one class, or a function that makes an instance; a column of the data may say which task it is."
        raise _of_type(environment_factory, "environment_factory", remedy)
    return environment_factory if inspect.isclass(environment_factory) else ToolFactory(environment_factory)


def _of_environment(tree: Tree) -> Records:
    """As many empty prompts as all steps take. Errors: ``missing-key``."""
    steps = value_at(tree, "training.max_steps")
    if not isinstance(steps, int):
        problem, remedy = "is missing, and no train_dataset is passed", "Set it: it says how many prompts are reset."
        raise ConfigError(problem, code="missing-key", key="training.max_steps", remedy=remedy)
    sizes = (
        value_at(tree, f"training.{name}") for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    count = steps * math.prod(size for size in sizes if isinstance(size, int))
    return [{"messages": [{"role": "user", "content": ""}]}] * count


def _as_records(given: object, key: str) -> Records | None:
    if given is not None and (isinstance(given, Mapping) or not isinstance(given, Iterable | Path)):
        raise _of_type(given, key, "Pass a list of records, a datasets.Dataset of one split, or the path of a file.")
    return given


def _of_type(given: object, key: str, remedy: str) -> ConfigError:
    return ConfigError(f"is {type(given).__name__}", code="argument-unknown", key=key, remedy=remedy)


def name_of(item: object) -> str:
    """``module:name`` of a function or class; lambdas, closures, partials and instances get one.

    >>> name_of(name_of)
    'rollmatch.api:name_of'
    """
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", "")
    is_named = module is not None and getattr(sys.modules.get(module), name, None) is item
    return f"{module}:{name}" if is_named else name_passed(item)


def _with_rewards(tree: Tree, rewards: Sequence[tuple[Callable[..., object], float]]) -> Tree:
    """The tree with reward functions. Errors: ``RewardNotImportable``, ``ConfigError`` with ``given-twice``."""
    if value_at(tree, REWARDS):
        problem, remedy = "is set, and rewards are passed, too", "Leave one of the two out."
        raise ConfigError(problem, code="given-twice", key=REWARDS, remedy=remedy)
    entries = [{"function": name_of(function), "weight": weight} for function, weight in rewards]
    return merge(merge(nested({"custom.trainer_variant": "grpo"}), tree), nested({REWARDS: entries}))


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


def _line_of(row: Mapping[str, object], key: str) -> bytes:
    if not isinstance(row, Mapping):
        problem, remedy = f"is no mapping, but {row!r:.60}", "Give a list of records, such as [{'prompt': '1 + 1?'}]."
        raise RecordNotJson(problem, key=key, remedy=remedy)
    if hasattr(row.get("image"), "save") and "images" not in row:  # TRL's column of one picture
        row = {"images": [row["image"]], **{name: value for name, value in row.items() if name != "image"}}
    try:
        return f"{json.dumps(row, ensure_ascii=False, default=_path_of)}\n".encode()
    except (TypeError, ValueError) as error:  # also half a character, and a record that contains itself
        remedy = "Give images as paths or pictures of PIL, or name the data set in custom.dataset."
        raise RecordNotJson(str(error), key=key, remedy=remedy) from error


def _path_of(value: object) -> str:
    """The file of a picture, which ``datasets`` decodes. Errors: ``TypeError``."""
    from PIL import Image

    from rollmatch.data.hub import cached_image
    from rollmatch.data.image import as_png

    if not isinstance(value, Image.Image):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return cached_image(as_png(value), ".png")


def _with_arguments(tree: Tree, arguments: Mapping[str, object]) -> Tree:
    """The tree with the arguments of a trainer. Errors: ``ConfigError`` with ``given-twice``."""
    for key, value in arguments.items():
        given = value_at(tree, key)
        if given not in (None, value):
            problem, remedy = f"is {given}, the trainer's argument is {value}", "Leave the key out of config."
            raise ConfigError(problem, code="given-twice", key=key, remedy=remedy)
    return merge(tree, nested(arguments))


def output_dir_of(tree: Tree) -> str:
    """``training.output_dir``. Errors: ``ConfigError`` with ``missing-key``."""
    found = value_at(tree, "training.output_dir")
    if not isinstance(found, str):
        problem = "this key is required"
        raise ConfigError(problem, code="missing-key", key="training.output_dir", remedy="Add it; it has no default.")
    return found
