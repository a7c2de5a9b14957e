"""The files and directories that a tree names."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from rollmatch.config.schema import RunConfig
from rollmatch.config.server_rules import read_servers
from rollmatch.config.servers import server_section, uses_servers
from rollmatch.errors import ConfigError, ErrorList

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")
"""One of them holds a model's tokenizer."""


def check_files(config: RunConfig) -> None:
    """Check that what the tree names exists. Errors: ``ErrorList`` of the errors of this file."""
    errors = [*_check_model(config), *_check_teachers(config), *_check_data(config), *_check_servers(config)]
    if errors:
        raise ErrorList(errors)


def check_model(config: RunConfig) -> None:
    """Check the model alone, for a machine that serves and has no data. Errors: as ``check_files``."""
    errors = [*_check_model(config)]
    if errors:
        raise ErrorList(errors)


def _check_model(config: RunConfig) -> Iterator[ConfigError]:
    directory = Path(config.model.model)
    yield from _check_directory(directory, key="model.model")
    if os.path.isfile(directory / "config.json"):
        yield from _check_description(config, directory / "config.json")
    if config.model.adapter is not None and not os.path.isdir(config.model.adapter):
        problem, remedy = f"{config.model.adapter} is not a directory", "Name the directory of an adapter of peft."
        yield ConfigError(problem, code="model-directory-missing", key="model.adapter", remedy=remedy)


def _check_teachers(config: RunConfig) -> Iterator[ConfigError]:
    for place, teacher in enumerate(config.custom.extra.distill.teachers):
        if teacher.model is not None:
            yield from _check_directory(Path(teacher.model), key=f"custom.extra.distill.teachers.{place}.model")


def _check_directory(directory: Path, *, key: str) -> Iterator[ConfigError]:
    if not os.path.isdir(directory):  # of a name of any length
        remedy = "Name a directory, or the id of a model on the Hugging Face hub, such as organization/name."
        yield ConfigError(f"{directory} is not a directory", code="model-directory-missing", key=key, remedy=remedy)
        return
    for names in (("config.json",), TOKENIZER_FILES):
        if not any((directory / name).is_file() for name in names):
            remedy = "Save the model with its fast tokenizer there."
            yield ConfigError(f"{directory} has no {names[0]}", code="model-file-missing", key=key, remedy=remedy)


def quantized(model: str) -> ConfigError:
    """The error for a model whose weights are quantized."""
    remedy = "Use the unquantized checkpoint; adapters on quantized weights (QLoRA) are not supported."
    return ConfigError(f"{model} holds quantized weights", code="base-quantized", key="model.model", remedy=remedy)


def _check_description(config: RunConfig, path: Path) -> Iterator[ConfigError]:
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        yield ConfigError(
            f"{path} is not readable JSON: {error}",
            code="model-file-missing",
            key="model.model",
            remedy="Save the model again.",
        )
        return
    if not isinstance(described, dict):
        problem, remedy = f"{path} holds no JSON object", "Save the model again."
        yield ConfigError(problem, code="model-file-missing", key="model.model", remedy=remedy)
        return
    if described.get("quantization_config") is not None:
        yield quantized(config.model.model)
    text = described.get("text_config", described)
    positions = text.get("max_position_embeddings") if isinstance(text, dict) else None
    if isinstance(positions, int) and config.global_max_length > positions:
        problem = f"must be at most the model's {positions} positions, but is {config.global_max_length}"
        yield ConfigError(
            problem,
            code="model-too-short",
            key="global_max_length",
            remedy="Lower it, or use a model with more positions.",
        )


def _check_servers(config: RunConfig) -> Iterator[ConfigError]:
    if uses_servers(config) and (section := server_section(config)).servers_file is not None:
        try:
            read_servers(section)
        except ConfigError as error:
            yield error


def _check_data(config: RunConfig) -> Iterator[ConfigError]:
    for name in ("train_jsonl", "val_jsonl") if config.custom.dataset is None else ():
        given = getattr(config.custom, name)
        if given is not None and not os.path.isfile(path := Path(given)):
            remedy = "Name a JSONL file; relative paths start at the working directory."
            yield ConfigError(f"{path} is not a file", code="data-file-missing", key=f"custom.{name}", remedy=remedy)
    root = config.custom.image_root
    if root is not None and not os.path.isdir(root):
        remedy = "Name a directory, or leave it out."
        yield ConfigError(
            f"{root} is not a directory", code="image-root-missing", key="custom.image_root", remedy=remedy
        )
