"""Everything that can be checked before a model is loaded, reported together. Imports no torch.

``check_training_arguments`` alone needs transformers; prompts, which need it too, are in ``prompts``.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit

from rollmatch.config import RunConfig, check_files, effective
from rollmatch.config.objective_rules import find_sampling_bias
from rollmatch.config.training import TrainingConfig
from rollmatch.data import BadSamples
from rollmatch.data.splits import Split, load_split, origin_of
from rollmatch.environments.coroutines import CoroutineEnvironment
from rollmatch.environments.environment import begin
from rollmatch.environments.limits import DEFAULTS
from rollmatch.environments.loading import load_tool_environment
from rollmatch.environments.tools import load_class
from rollmatch.errors import ConfigError, ErrorList, RollmatchError, TargetError, kind_and_text
from rollmatch.model.source import checkpoints_in
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.model.weight_files import check_weights
from rollmatch.objectives.grpo.reward import Reward, is_of_function, try_out
from rollmatch.objectives.rollout_matching.target import check_exact
from rollmatch.records import Sample
from rollmatch.run.directory import probe_output_dir
from rollmatch.run.plugins import (
    load_callbacks,
    load_configured_format,
    load_rewards,
    needs_coord_tokens,
    with_first_observations,
)
from rollmatch.startup import loading

REPORTERS = {"wandb": ("wandb",), "tensorboard": ("tensorboard", "tensorboardX")}
"""Reporter -> the packages of which one must be installed."""


def print_warning(warning: str) -> None:
    """Print it."""
    print(f"rollmatch: warning: {warning}", file=sys.stderr)


def load_checked(
    config: RunConfig, warn: Callable[[str], object] = print_warning
) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """Training and validation samples, after all checks.

    Warns of a sampling bias, and of rewards that failed. Errors: ``ErrorList`` of all that is wrong with files,
    samples, tokenizer, rewards, environment, reporters and the output directory.
    """
    errors: list[RollmatchError] = []
    _collect(errors, partial(check_files, config))
    if all(error.key != "model.model" for error in errors):
        _collect(errors, partial(_check_tokenizer, config))
        _collect(errors, partial(check_weights, Path(config.model.model), key="model.model"))
    if config.model.adapter is not None and os.path.isdir(config.model.adapter):
        _collect(errors, partial(check_weights, Path(config.model.adapter), key="model.adapter"))
    _collect(errors, partial(_check_model_elsewhere, config))
    rewards: list[Reward] = []
    _collect(errors, lambda: rewards.extend(load_rewards(config)))
    _collect(errors, partial(load_callbacks, config))
    _collect(errors, partial(_check_reporters, config))
    if (problem := probe_output_dir(Path(config.training.output_dir))) is not None:
        errors.append(problem)
    samples: list[Sequence[Sample]] = []
    splits: tuple[Split, Split] = ("train", "val")
    for split in splits:
        is_file = config.custom.dataset is None and (split == "train" or config.custom.is_evaluated)
        if not is_file or os.path.isfile(origin_of(config.custom, split)):
            _collect(errors, partial(_load_into, samples, config, split))
    if errors:
        raise ErrorList(errors)
    train, val = (with_first_observations(config, part) for part in samples)
    _try_rewards(config, rewards, train, warn)
    if (bias := find_sampling_bias(config)) is not None:
        warn(bias)
    if config.custom.is_evaluated and origin_of(config.custom, "val") == origin_of(config.custom, "train"):
        warn(f"{origin_of(config.custom, 'val')} is learnt from and evaluated: the evaluation says nothing of others")
    return train, val


def _try_rewards(
    config: RunConfig, rewards: Sequence[Reward], samples: Sequence[Sample], warn: Callable[[str], object]
) -> None:
    """Call each reward function for two completions; an error that may be due to the answer is a warning.

    Errors: ``ErrorList`` of ``reward-fails``.
    """
    key = "custom.extra.grpo.rewards"
    if not (rewards and samples):
        return
    with loading():
        from transformers import TrainerState
    errors: list[RollmatchError] = []
    offered = {
        "trainer_state": TrainerState(max_steps=config.training.max_steps),
        **_environments_of(config, samples[0]),
    }
    failed = try_out(rewards, samples[0], offered)
    for name, error in failed:
        what = error.problem if isinstance(error, TargetError) else f"raised {kind_and_text(error)}"
        problem = f"{name} on {samples[0].origin} {what}"
        if is_of_function(error):
            columns = ", ".join(samples[0].metadata) or "nothing"
            remedy = f"Correct the function, or the data; the metadata of this sample has {columns}."
            errors.append(ConfigError(problem, code="reward-fails", key=key, remedy=remedy))
        else:
            warn(problem)
    if effective.judges_ahead(config):
        names = {name for name, _ in failed}
        left = [one for one in rewards if one.call.processes is None and one.name not in names]
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(try_out, left, samples[0], offered).result()
        for name, error in found:
            problem = f"{name} works in the main thread alone: {kind_and_text(error)}"
            remedy = "Set its processes to 1, or overlap to off: with ahead, values are made in another thread."
            errors.append(ConfigError(problem, code="reward-fails", key=key, remedy=remedy))
    if errors:
        raise ErrorList(errors)


def _environments_of(config: RunConfig, sample: Sample) -> dict[str, object]:
    """Two of a class among tools, at their beginning, as reward functions get them. Errors: of ``begin``."""
    tools = config.custom.extra.environment.tools
    if load_class(tools) is None:
        return {}
    make = load_tool_environment(tools, limits=DEFAULTS)
    begun = [begin(make, sample, run_seed=config.training.seed)[0] for _ in range(2)]
    return {"environments": [one.instance() for one in begun if isinstance(one, CoroutineEnvironment)]}


def check_training_arguments(training: TrainingConfig) -> None:
    """Compare optimizer, schedule and extra arguments with transformers. Errors: ``ErrorList``."""
    with loading():
        from transformers import TrainingArguments
        from transformers.trainer_utils import SchedulerType
        from transformers.training_args import OptimizerNames
    known = [field.name for field in fields(TrainingArguments)]
    errors = [
        _unknown(f"training.extra_arguments.{name}", name, known, code="argument-unknown")
        for name in training.extra_arguments
        if name not in known
    ]
    for key, value, kind in (
        ("training.optim", training.optim, OptimizerNames),
        ("training.lr_scheduler_type", training.lr_scheduler_type, SchedulerType),
    ):
        choices = [str(choice.value) for choice in kind]
        if value not in choices:
            errors.append(_unknown(key, value, choices, code="not-a-choice"))
    if errors:
        raise ErrorList(errors)


def _unknown(key: str, value: str, choices: Sequence[str], *, code: str) -> ConfigError:
    close = [name for name in choices if name.startswith(value)] or get_close_matches(value, choices)
    remedy = f"Did you mean {close[0]}?" if close else "Use a name of transformers.TrainingArguments, or remove it."
    return ConfigError(f"transformers does not know {value!r}", code=code, key=key, remedy=remedy)


def _collect(errors: list[RollmatchError], check: Callable[[], object]) -> None:
    try:
        check()
    except BadSamples as bad:  # kept whole: it knows how many of its errors to hide
        errors.append(bad)
    except ErrorList as several:
        errors += several.errors
    except RollmatchError as error:
        errors.append(error)


def _load_into(samples: list[Sequence[Sample]], config: RunConfig, split: Split) -> None:
    samples.append(load_split(config.custom, split))


def _check_tokenizer(config: RunConfig) -> None:
    model = config.model
    try:
        vocabulary = Vocabulary.load(model.model, stop_token=model.stop_token, coordinates=needs_coord_tokens(config))
    except ModuleNotFoundError:  # without transformers; the report says that prompts were not counted, either
        return
    if config.custom.detects:
        check_exact(vocabulary, load_configured_format(config))


def _check_model_elsewhere(config: RunConfig) -> None:
    """A run removes the checkpoints in its directory, at the latest when it has newer ones."""
    own = [checkpoint.resolve() for checkpoint in checkpoints_in(Path(config.training.output_dir))]
    for name in ("model", "adapter"):
        given = getattr(config.model, name)
        place = None if given is None else Path(os.path.realpath(given))
        if place is not None and any(checkpoint in (place, *place.parents) for checkpoint in own):
            problem, remedy = f"holds {given}, which this run would remove", "Name another directory."
            raise ConfigError(problem, code="model-in-output-dir", key="training.output_dir", remedy=remedy)


def _check_reporters(config: RunConfig) -> None:
    for name in config.training.report_to:
        packages = REPORTERS.get(name, ())
        if packages and not any(importlib.util.find_spec(package) for package in packages):
            problem, remedy = f"{name} is not installed", f"Install it (pip install {name}), or remove it here."
            raise ConfigError(problem, code="reporter-missing", key="training.report_to", remedy=remedy)
    if "wandb" in config.training.report_to and not _knows_wandb():
        problem, remedy = "wandb has no API key", "Run wandb login, set WANDB_API_KEY, or set WANDB_MODE=offline."
        raise ConfigError(problem, code="reporter-without-key", key="training.report_to", remedy=remedy)


def _knows_wandb() -> bool:
    """Whether wandb needs no key, or finds one in the environment or where ``wandb login`` puts it."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or os.environ.get("WANDB_API_KEY"):
        return True
    if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
