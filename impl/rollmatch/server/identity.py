"""What the server serves: every tensor of the model directory, without reading a weight."""

import json
import struct
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rollmatch.errors import ConfigError
from rollmatch.server.payloads import TensorSpec

_FLOATS = ("F64", "F32", "F16", "BF16")
_TORCH_NAMES = {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Names, types and shapes of a model's tensors."""

    directory: str
    tensors: dict[str, TensorSpec]
    aliases: dict[str, str]
    """Names of tied tensors -> the tensor they are tied to."""

    @property
    def digest(self) -> str:
        """Over names, types and shapes."""
        lines = sorted(f"{spec.name}:{spec.dtype}:{list(spec.shape)}" for spec in self.tensors.values())
        return blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def load_model_identity(directory: str | Path, *, dtype: str) -> Model:
    """Read the headers of the directory's safetensors; floating tensors are held in ``dtype``.

    Errors: ``checkpoint-missing``.
    """
    directory = Path(directory)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        remedy = "Serve a directory with config.json, tokenizer and model.safetensors."
        raise ConfigError(
            f"{directory} has no *.safetensors", code="checkpoint-missing", key="model.model", remedy=remedy
        )
    shapes: dict[str, TensorSpec] = {}
    for path in files:
        for name, header in _read_header(path).items():
            held = dtype if header["dtype"] in _FLOATS else _TORCH_NAMES[header["dtype"]]
            shapes[name] = TensorSpec(name=name, dtype=held, shape=tuple(header["shape"]))
    aliases = _tied(json.loads((directory / "config.json").read_text()), shapes)
    for name in aliases:
        shapes.pop(name, None)
    return Model(directory=str(directory.resolve()), tensors=shapes, aliases=aliases)


def _read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, object] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def _tied(config: dict[str, Any], tensors: dict[str, TensorSpec]) -> dict[str, str]:
    """The output head, where it is the embedding."""
    tied = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False))
    embedding = next((name for name in tensors if name.endswith(_EMBEDDING)), None)
    return {_HEAD: embedding} if tied and embedding else {}
