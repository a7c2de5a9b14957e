"""Whether ranks, machine and launcher fit ``training.strategy`` and the rollouts. Imports no torch."""

import importlib.util
import os
from collections.abc import Iterator

from rollmatch.config import RunConfig, effective
from rollmatch.config.servers import is_colocated, sync_mode
from rollmatch.config.strategy import KEY, Strategy, read_strategy
from rollmatch.errors import ConfigError, ErrorList, LaunchError, RollmatchError

LAUNCHER_VARIABLES = {"ACCELERATE_USE_FSDP": "fsdp2", "ACCELERATE_USE_DEEPSPEED": "deepspeed"}
"""Set by ``accelerate launch``, and obeyed by accelerate whatever else is set."""
STAGE = "ACCELERATE_DEEPSPEED_ZERO_STAGE"
LAUNCHER_FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"
"""Names, with commas between them, of what the file of ``accelerate launch`` says under ``deepspeed_config``."""
PARALLELISM_VARIABLE = "ACCELERATE_USE_PARALLELISM_CONFIG"
"""Set by ``accelerate launch --use_parallelism_config``: ranks would share rows or layers."""


def check_strategy(config: RunConfig, *, learner_world_size: int | None = None) -> None:
    """Check that this machine fits ``training.strategy``, and all that depends on the learner's ranks, where known.

    Errors: ``ErrorList`` of ``strategy-needs-ranks``, ``deepspeed-missing``, ``strategy-contradicted``,
    ``parallelism-unsupported``, ``adapter-with-several-ranks``, ``tensor-parallel-mismatch``.
    """
    strategy = read_strategy(config.training.strategy)
    errors: list[RollmatchError] = [*_unfit(strategy, config.training.strategy, learner_world_size)]
    if learner_world_size is not None:
        errors += _unfit_rollouts(config, learner_world_size)
    errors += _contradicted(strategy, config) if strategy.engine == "deepspeed" else []
    if errors:
        raise ErrorList(errors)


def _unfit_rollouts(config: RunConfig, learner_world_size: int) -> Iterator[ConfigError]:
    for check in (sync_mode, effective.tensor_parallel_size) if is_colocated(config) else (sync_mode,):
        try:
            check(config, learner_world_size=learner_world_size)
        except ConfigError as error:
            yield error


def _unfit(strategy: Strategy, name: str, learner_world_size: int | None) -> Iterator[LaunchError]:
    if strategy.engine == "fsdp2" and learner_world_size == 1:
        problem, remedy = f"{name} needs two learner ranks or more", "Add --gpus 0,1, or set it to ddp."
        yield LaunchError(problem, code="strategy-needs-ranks", key=KEY, remedy=remedy)
    if strategy.engine == "deepspeed" and learner_world_size == 1 and "LOCAL_RANK" not in os.environ:
        problem = f"{name} needs a launcher, and one rank is started without"
        remedy = "Add --gpus 0,1; for one rank: torchrun --nproc-per-node 1 -m rollmatch train; else set it to ddp."
        yield LaunchError(problem, code="strategy-needs-ranks", key=KEY, remedy=remedy)
    if strategy.engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        remedy = "Run pip install deepspeed, or set it to fsdp2."
        yield LaunchError(f"{name} needs deepspeed", code="deepspeed-missing", key=KEY, remedy=remedy)
    for variable, engine in LAUNCHER_VARIABLES.items():
        if os.environ.get(variable, "").lower() == "true" and engine != strategy.engine:
            fitting = f"deepspeed_zero{os.environ.get(STAGE, '3')}" if engine == "deepspeed" else engine
            problem, remedy = f"is {name}, but {variable} is set", f"Remove the variable, or set it to {fitting}."
            yield LaunchError(problem, code="strategy-contradicted", key=KEY, remedy=remedy)
    if os.environ.get(PARALLELISM_VARIABLE, "").lower() == "true":
        problem = f"{PARALLELISM_VARIABLE} is set, but each rank learns from whole rows of its own"
        remedy = "Start without --use_parallelism_config; for long rows set training.strategy to fsdp2."
        yield LaunchError(problem, code="parallelism-unsupported", key=PARALLELISM_VARIABLE, remedy=remedy)


def _contradicted(strategy: Strategy, config: RunConfig) -> Iterator[LaunchError]:
    """What ``accelerate launch --config_file`` asks of DeepSpeed in other words than ours, which are obeyed."""
    fields = os.environ.get(LAUNCHER_FIELDS, "").split(",")
    training, zero = config.training, strategy.settings.get("zero_optimization")
    ours = {STAGE: str(strategy.stage), "ACCELERATE_DEEPSPEED_CONFIG_FILE": ""}
    for part in ("optimizer", "param"):
        offload = zero.get(f"offload_{part}") if isinstance(zero, dict) else None
        device = offload.get("device", "none") if isinstance(offload, dict) else "none"
        ours[f"ACCELERATE_DEEPSPEED_OFFLOAD_{part.upper()}_DEVICE"] = str(device)
    if "gradient_accumulation_steps" in fields:
        ours["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(training.gradient_accumulation_steps)
    if "gradient_clipping" in fields:
        ours["ACCELERATE_GRADIENT_CLIPPING"] = str(float(training.max_grad_norm))
    for variable, value in ours.items():
        if (theirs := os.environ.get(variable, value)) != value:
            problem = f"is {training.strategy}, which means {value or 'no file'}, but {variable} is {theirs}"
            remedy = "Set both alike; a file with DeepSpeed's own settings is named here."
            yield LaunchError(problem, code="strategy-contradicted", key=KEY, remedy=remedy)
