"""Whether the files of a model's weights are there and whole, by their headers alone. Imports no torch."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollmatch.errors import ConfigError, ErrorList

INDEX = "model.safetensors.index.json"
OTHERS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin")
"""Weights that transformers reads where there are no safetensors; their headers do not say how long they are."""
LONGEST_HEADER = 100_000_000
"""In bytes, as in safetensors."""
REMEDY = "Download or save the model again."


def check_weights(directory: Path, *, key: str) -> None:
    """Of a model or an adapter. Errors: ``ErrorList`` of ``weights-missing`` and ``weights-damaged``."""
    errors = [*_faults(directory, key)]
    if errors:
        raise ErrorList(errors)


def _faults(directory: Path, key: str) -> Iterator[ConfigError]:
    paths = _files_of(directory, key)
    if isinstance(paths, ConfigError):
        yield paths
        return
    for path in paths:
        if not path.is_file():
            yield ConfigError(f"{path} is missing", code="weights-missing", key=key, remedy=REMEDY)
        elif (problem := damage_of(path)) is not None:
            yield ConfigError(f"{path} {problem}", code="weights-damaged", key=key, remedy=REMEDY)


def _files_of(directory: Path, key: str) -> list[Path] | ConfigError:
    """The safetensors that hold the weights; none where they are in another format."""
    index = directory / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return [directory / name for name in sorted(names)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f"{index} is not readable: {error!r}"
            return ConfigError(problem, code="weights-damaged", key=key, remedy=REMEDY)
    found = sorted(directory.glob("*.safetensors"))
    if found or any((directory / name).is_file() for name in OTHERS):
        return found
    problem = f"{directory} holds no weights"
    return ConfigError(problem, code="weights-missing", key=key, remedy="Save the model with its weights there.")


def damage_of(path: Path) -> str | None:
    """What is wrong with a file of safetensors: a length (8 bytes), a JSON header, then the tensors without gaps."""
    size = path.stat().st_size
    try:
        header, start = read_header(path)
        ends = [each["data_offsets"][1] for each in header.values()]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return "has no readable header: it is cut off, or a pointer of Git LFS"
    expected = start + max(ends, default=0)
    return None if size == expected else f"has {size} bytes instead of {expected}"


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Tensors of a file of safetensors by name, and the byte at which their data begin.

    Errors: ``OSError``, ``struct.error``, ``ValueError`` and ``AttributeError`` where it has no such header.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > LONGEST_HEADER:
            raise ValueError(f"its header has {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length
