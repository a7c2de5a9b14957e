"""Whether the files of a model's weights are there and whole, by their headers alone. Imports no torch."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from rollmatch.errors import ConfigError, ErrorList

KEY = "model.model"
INDEX = "model.safetensors.index.json"
OTHERS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weights that transformers reads where there are no safetensors; their headers do not say how long they are."""
REMEDY = "Download or save the model again."


def check_weights(directory: Path) -> None:
    """Errors: ``ErrorList`` of ``weights-missing`` and ``weights-damaged``."""
    errors = [*_faults(directory)]
    if errors:
        raise ErrorList(errors)


def _faults(directory: Path) -> Iterator[ConfigError]:
    paths = _files_of(directory)
    if isinstance(paths, ConfigError):
        yield paths
        return
    for path in paths:
        if not path.is_file():
            yield ConfigError(f"{path} is missing", code="weights-missing", key=KEY, remedy=REMEDY)
        elif (problem := damage_of(path)) is not None:
            yield ConfigError(f"{path} {problem}", code="weights-damaged", key=KEY, remedy=REMEDY)


def _files_of(directory: Path) -> list[Path] | ConfigError:
    """The safetensors that hold the weights; none where they are in another format."""
    index = directory / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{index} is not readable: {error!r}"
            return ConfigError(problem, code="weights-damaged", key=KEY, remedy=REMEDY)
        return [directory / name for name in sorted(names)]
    found = sorted(directory.glob("*.safetensors"))
    if found or any((directory / name).is_file() for name in OTHERS):
        return found
    problem = f"{directory} holds no weights"
    return ConfigError(problem, code="weights-missing", key=KEY, remedy="Save the model with its weights there.")


def damage_of(path: Path) -> str | None:
    """What is wrong with a file of safetensors: a length (8 bytes), a JSON header, then the tensors without gaps."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                return f"has {size} bytes, its header says that it alone has {length}"
            header = json.loads(file.read(length))
        ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "has no readable header: it is cut off, or a pointer of Git LFS"
    expected = 8 + length + max(ends, default=0)
    return None if size == expected else f"has {size} bytes instead of {expected}"
