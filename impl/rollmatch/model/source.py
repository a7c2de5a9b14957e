"""Where a model comes from: a directory, a run, a hub id, an adapter on any of them. Imports no torch.

Hub ids are looked up in the cache first; HF_HUB_OFFLINE and the other variables of huggingface_hub are respected.
"""

import json
import os
import re
from pathlib import Path

import yaml

from rollmatch.config import RunConfig
from rollmatch.config.training import ModelConfig
from rollmatch.errors import ConfigError, first_line

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""What is fetched of a repository."""
ADAPTER_FILE = "adapter_config.json"
MANIFEST = "manifest.json"
"""File of a whole checkpoint, written last; ``training.checkpoint`` says what it holds."""
TEACHERS = "custom.extra.distill.teachers"
SPLIT = "pytorch_model_fsdp_0"
"""Folder of a checkpoint that holds weights in parts; accelerate's name."""
CONFIG_FILE = "resolved.yaml"
"""Beside the checkpoints of a run: its configuration."""
DTYPES = ("float32", "bfloat16", "float16")


def dtype_of(directory: Path) -> str:
    """The dtype that config.json names; float32 where it names none."""
    described = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for part in (described, described.get("text_config", {})):
        found = str(part.get("dtype") or part.get("torch_dtype") or "")
        if found in DTYPES:
            return found
    return "float32"


def with_local_model(config: RunConfig) -> RunConfig:
    """The configuration with directories in place of hub ids. Errors: ``model-directory-missing``."""
    custom = config.custom
    teachers = tuple(
        teacher.model_copy(
            update={"model": local_directory(teacher.model, revision=None, key=f"{TEACHERS}.{place}.model")}
        )
        if teacher.model
        else teacher
        for place, teacher in enumerate(custom.extra.distill.teachers)
    )
    distill = custom.extra.distill.model_copy(update={"teachers": teachers})
    extra = custom.extra.model_copy(update={"distill": distill})
    custom = custom.model_copy(update={"extra": extra})
    return config.model_copy(update={"model": local_model(config.model), "custom": custom})


def num_positions(directory: Path) -> int | None:
    """Most tokens of a sequence, as config.json says it; None where it says nothing."""
    described = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    positions = described.get("text_config", described).get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def local_model(config: ModelConfig) -> ModelConfig:
    """Directories in place of hub ids; a model that is an adapter becomes its base and the adapter.

    Errors: ``model-directory-missing``, ``adapter-on-adapter``.
    """
    directory = local_directory(config.model, revision=config.revision, key="model.model")
    adapter = config.adapter and local_directory(config.adapter, revision=None, key="model.adapter")
    path = Path(directory) / ADAPTER_FILE
    if adapter is None and os.path.isfile(path):
        base = _named_by_adapter(path, "base_model_name_or_path", key="model.model")
        directory, adapter = local_directory(base, revision=None, key="model.model"), directory
    if adapter is not None and os.path.isdir(adapter):
        _named_by_adapter(Path(adapter) / ADAPTER_FILE, "peft_type", key="model.adapter")
        _check_whole(Path(adapter))
    return config.model_copy(update={"model": directory, "adapter": adapter})


def _named_by_adapter(path: Path, field: str, *, key: str) -> str:
    """A field of what peft has written about an adapter. Errors: ``model-file-missing``."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))[field]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        found = None
    if isinstance(found, str):
        return found
    problem, remedy = f"{path} names no {field}", "Save the adapter again with peft's save_pretrained."
    raise ConfigError(problem, code="model-file-missing", key=key, remedy=remedy)


def _check_whole(adapter: Path) -> None:
    """A run that had merged another adapter before saves its own only. Errors: ``adapter-on-adapter``."""
    described = adapter.parent / CONFIG_FILE
    run = yaml.safe_load(described.read_text(encoding="utf-8")) if described.is_file() else {}
    model, tuner = run.get("model", {}), run.get("tuner", {})
    continues = model.get("adapter_start") == "continue" and tuner.get("train_type") == "lora"
    if model.get("adapter") is not None and not continues:
        problem = f"{adapter} lies on {model.get('model')} with {model['adapter']} merged, which it does not hold"
        remedy = f"Run rollmatch export {adapter.parent} OUT, and name OUT."
        raise ConfigError(problem, code="adapter-on-adapter", key="model.model", remedy=remedy)


def checkpoints_in(directory: Path) -> list[Path]:
    """Directories named ``checkpoint-<step>``, newest first."""
    named = [path for path in directory.glob("checkpoint-*") if re.fullmatch(r"checkpoint-[0-9]+", path.name)]
    return sorted(named, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which it was saved.

    >>> step_of(Path("runs/first/checkpoint-40"))
    40
    """
    return int(checkpoint.name.rpartition("-")[2])


def _checkpoint_of(directory: Path) -> str:
    """The newest whole checkpoint of a run's directory; any other directory as it is."""
    whole = [path for path in checkpoints_in(directory) if (path / MANIFEST).is_file()]
    if whole and (whole[0] / SPLIT).is_dir():
        problem, remedy = f"{whole[0]} holds weights in parts", f"Run rollmatch export {directory} OUT, and name OUT."
        raise ConfigError(problem, code="model-in-parts", key="model.model", remedy=remedy)
    return str(directory if (directory / "config.json").is_file() or not whole else whole[0])


def local_directory(name: str, *, revision: str | None, key: str) -> str:
    """The directory of a model that is named by itself, by its run or by its hub id; another name stays.

    Errors: ``model-directory-missing``.
    """
    if os.path.isdir(name):
        return _checkpoint_of(Path(name))
    if not HUB_ID.fullmatch(name):
        return name
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return snapshot_download(name, revision=revision, allow_patterns=list(FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = first_line(error)
        raise ConfigError(
            f"{name} is no directory, and no model of the hub that can be read: {reason}",
            code="model-directory-missing",
            key=key,
            remedy="Correct the name, or download the model and name its directory.",
        ) from error
