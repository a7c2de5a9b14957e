"""What the server serves: every tensor of the model directory, without reading a weight."""

import json
import struct
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rollmatch.errors import ConfigError, first_line
from rollmatch.model.weight_files import read_header
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

    Errors: ``checkpoint-missing``, ``model-unreadable``.
    """
    directory = Path(directory)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        remedy = "Serve a directory with config.json, tokenizer and model.safetensors."
        raise ConfigError(
            f"{directory} has no *.safetensors", code="checkpoint-missing", key="model.model", remedy=remedy
        )
    shapes: dict[str, TensorSpec] = {}
    path = files[0]
    try:
        for path in files:
            for name, header in read_header(path)[0].items():
                held = dtype if header["dtype"] in _FLOATS else _TORCH_NAMES[header["dtype"]]
                shapes[name] = TensorSpec(name=name, dtype=held, shape=tuple(header["shape"]))
        path = directory / "config.json"
        aliases = _tied(json.loads(path.read_text()), shapes)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
        problem = f"{path} cannot be read: {type(error).__name__}: {first_line(error)}"
        remedy = "Serve a directory that save_pretrained wrote."
        raise ConfigError(problem, code="model-unreadable", key="model.model", remedy=remedy) from error
    for name in aliases:
        shapes.pop(name, None)
    return Model(directory=str(directory.resolve()), tensors=shapes, aliases=aliases)


def _tied(config: dict[str, Any], tensors: dict[str, TensorSpec]) -> dict[str, str]:
    """The output head, where it is the embedding."""
    tied = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False))
    embedding = next((name for name in tensors if name.endswith(_EMBEDDING)), None)
    return {_HEAD: embedding} if tied and embedding else {}
