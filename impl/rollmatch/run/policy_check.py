"""What of a policy can be checked without its weights: attention, frozen and adapted parts, the size of a checkpoint.

The model is built from its ``config.json`` on torch's meta device, which takes no memory.
"""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from rollmatch.config import RunConfig, effective
from rollmatch.config.servers import is_colocated
from rollmatch.config.training import TrainingConfig
from rollmatch.errors import ConfigError, LaunchError, kind_and_text
from rollmatch.model.policy import auto_class, check_adapter, count_weights, load_architecture, prepare
from rollmatch.model.source import dtype_of
from rollmatch.report.numbers import compact
from rollmatch.rollout.adapter_proof import check_parts
from rollmatch.run.machine import has_gpu

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

FLASH = {
    "flash_attention_2": "Install flash-attn",
    "flash_attention_3": "Build flash-attn-3 from the folder hopper of flash-attention: PyPI has none",
    "flash_attention_4": "Install flash-attn-4 (pip install --pre: there are beta versions alone)",
}
"""Attention of transformers -> how to get the package that has it."""
MASTER_BYTES = 4
ADAM_STATES = 2


def check_policy(config: RunConfig) -> None:
    """Errors: ``attention-missing``, ``optimizer-refused``, ``adapter-unfit``, ``disk-too-small``.

    Those of ``prepare`` and ``check_parts``, too.
    """
    check_attention(config)
    model = _on_meta(config)
    check_optimizer(config.training, model)
    if config.model.adapter is not None:
        adapted = check_adapter(model, Path(config.model.adapter))
        if config.model.adapter_start == "merge":
            adapted = prepare(_on_meta(config), config.tuner)
    else:
        adapted = prepare(model, config.tuner)
        check_disk(config, adapted)
    vllm = config.custom.extra.rollout_matching.vllm
    may_fall_back = vllm.sync.mode == "auto" and vllm.sync.fallback_to_full
    if is_colocated(config) and vllm.carries_adapter and not may_fall_back:
        check_parts(adapted)


def check_optimizer(training: TrainingConfig, model: nn.Module) -> None:
    """Let transformers find the optimizer's class and arguments. Errors: ``optimizer-refused``."""
    from transformers import Trainer

    further = {"optim_args": None, "optim_target_modules": None, "parallel_mode": None}
    arguments = SimpleNamespace(**(further | training.model_dump() | training.extra_arguments))
    try:
        Trainer.get_optimizer_cls_and_kwargs(cast("TrainingArguments", arguments), cast("PreTrainedModel", model))
    except (ImportError, ValueError, TypeError, KeyError) as error:
        problem = f"transformers refuses it: {str(error).rstrip('.')}"
        remedy = "Do what it says, or set adamw_torch."
        raise ConfigError(problem, code="optimizer-refused", key="training.optim", remedy=remedy) from error


def check_attention(config: RunConfig) -> None:
    """Errors: ``attention-missing``."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_flash_attn_4_available

    name = config.model.attn_impl
    installed = {
        "flash_attention_2": is_flash_attn_2_available,
        "flash_attention_3": is_flash_attn_3_available,
        "flash_attention_4": is_flash_attn_4_available,
    }
    if name not in installed or (has_gpu() and installed[name]()):
        return
    problem = f"is {name}, which needs {'a package that is not installed' if has_gpu() else 'a GPU'}"
    remedy = f"{f'{FLASH[name]}, or set' if has_gpu() else 'Set'} packed, which needs nothing besides torch, or sdpa."
    raise ConfigError(problem, code="attention-missing", key="model.attn_impl", remedy=remedy)


def _on_meta(config: RunConfig) -> nn.Module:
    """Errors: ``model-unreadable``."""
    architecture = load_architecture(config.model.model)
    try:
        with torch.device("meta"):
            model: nn.Module = auto_class(architecture).from_config(architecture)
    except Exception as error:  # a class of any model, given sizes of any file
        problem = f"{config.model.model}/config.json describes no model: {kind_and_text(error)}"
        remedy = "Save the model again."
        raise ConfigError(problem, code="model-unreadable", key="model.model", remedy=remedy) from error
    model.name_or_path = config.model.model  # type: ignore[assignment]
    return model


def check_disk(config: RunConfig, model: nn.Module) -> None:
    """Errors: ``disk-too-small`` where one checkpoint does not fit."""
    output_dir = Path(config.training.output_dir).absolute()
    above = next(place for place in (output_dir, *output_dir.parents) if place.is_dir())
    needed, free = checkpoint_bytes(config, model), shutil.disk_usage(above).free
    if needed > free:
        problem = f"a checkpoint needs {compact(needed)}B, {above} has {compact(free)}B left"
        remedy = "Free space, or name another disk."
        raise LaunchError(problem, code="disk-too-small", key="training.output_dir", remedy=remedy)


def checkpoint_bytes(config: RunConfig, model: nn.Module) -> int:
    """What a checkpoint holds at least: trained weights (all of them without adapters), and Adam's two states each."""
    num, num_trained = count_weights(model)
    dtype = effective.learner_dtype(config)
    named = dtype_of(Path(config.model.model)) if dtype == "auto" else dtype
    size = torch.empty((), dtype=getattr(torch, named)).element_size()
    has_states = config.training.optim.startswith("adamw_torch") and not config.training.extra_arguments.get(
        "save_only_model"
    )
    is_full = config.tuner.train_type == "full"
    weights = num * size if is_full else num_trained * MASTER_BYTES
    return weights + (ADAM_STATES * num_trained * (size if is_full else MASTER_BYTES) if has_states else 0)
