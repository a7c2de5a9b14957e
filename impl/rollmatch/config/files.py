"""The files and directories that a tree names."""

import json
from collections.abc import Iterator
from pathlib import Path

from rollmatch.config.schema import RunConfig
from rollmatch.errors import ConfigError, ErrorList

MODEL_FILES = ("config.json", "tokenizer.json")


class ModelDirectoryMissing(ConfigError):
    """The model is not a directory on this machine."""

    code = "model-directory-missing"


class ModelFileMissing(ConfigError):
    """The model's directory lacks a file that is read before training, or it is not readable."""

    code = "model-file-missing"


class ModelTooShort(ConfigError):
    """The model has fewer positions than a segment may have tokens."""

    code = "model-too-short"


class DataFileMissing(ConfigError):
    """A data set is not a file on this machine."""

    code = "data-file-missing"


class ImageRootMissing(ConfigError):
    """The images' directory is not there."""

    code = "image-root-missing"


def check_files(config: RunConfig) -> None:
    """Check that what the tree names exists. Errors: ``ErrorList`` of the errors of this file."""
    errors = [*_check_model(config), *_check_data(config)]
    if errors:
        raise ErrorList(errors)


def check_model(config: RunConfig) -> None:
    """Check the model alone, for a machine that serves and has no data. Errors: as ``check_files``."""
    errors = [*_check_model(config)]
    if errors:
        raise ErrorList(errors)


def _check_model(config: RunConfig) -> Iterator[ConfigError]:
    directory, key = Path(config.model.model), "model.model"
    if not directory.is_dir():
        remedy = "Name a local directory; hub ids are not downloaded."
        yield ModelDirectoryMissing(f"{directory} is not a directory", key=key, remedy=remedy)
        return
    missing = [name for name in MODEL_FILES if not (directory / name).is_file()]
    for name in missing:
        remedy = "Save the model with its fast tokenizer there."
        yield ModelFileMissing(f"{directory} has no {name}", key=key, remedy=remedy)
    if "config.json" not in missing:
        yield from _check_positions(config, directory / "config.json")


def _check_positions(config: RunConfig, path: Path) -> Iterator[ConfigError]:
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield ModelFileMissing(
            f"{path} is not readable JSON: {error}", key="model.model", remedy="Save the model again."
        )
        return
    text = described.get("text_config", described) if isinstance(described, dict) else {}
    positions = text.get("max_position_embeddings") if isinstance(text, dict) else None
    if isinstance(positions, int) and config.global_max_length > positions:
        problem = f"must be at most the model's {positions} positions, but is {config.global_max_length}"
        yield ModelTooShort(problem, key="global_max_length", remedy="Lower it, or use a model with more positions.")


def _check_data(config: RunConfig) -> Iterator[ConfigError]:
    for name in ("train_jsonl", "val_jsonl"):
        path = Path(getattr(config.custom, name))
        if not path.is_file():
            remedy = "Name a JSONL file; relative paths start at the working directory."
            yield DataFileMissing(f"{path} is not a file", key=f"custom.{name}", remedy=remedy)
    root = config.custom.image_root
    if root is not None and not Path(root).is_dir():
        remedy = "Name a directory, or leave it out."
        yield ImageRootMissing(f"{root} is not a directory", key="custom.image_root", remedy=remedy)
