"""A model's sizes, read from its ``config.json``; nothing of the model is loaded."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollmatch.config import RunConfig
from rollmatch.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A matrix, and how many of its kind a model has."""

    num_in: int
    num_out: int
    count: int = 1
    num_active: int | None = None
    """How many of them a token passes; None: all."""

    @property
    def num_weights(self) -> int:
        """Of all of them."""
        return self.num_in * self.num_out * self.count

    @property
    def num_active_weights(self) -> int:
        """That one token passes."""
        return self.num_in * self.num_out * (self.count if self.num_active is None else self.num_active)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes that memory and time follow from."""

    hidden_len: int
    inner_len: int
    num_layers: int
    num_heads: int
    num_groups: int
    head_len: int
    num_ids: int
    is_tied: bool
    text: tuple[Linear, ...]
    """Matrices of the language model, without embedding and head."""
    vision: tuple[Linear, ...]
    """Those of the vision tower and its projectors."""
    dtype: str
    """Precision of the learner's weights."""
    saved_dtype: str
    """Precision that config.json names."""
    has_dropout: bool = False
    is_quantized: bool = False
    """Whether matrices take 8 bits, embedding and head left out."""

    @property
    def embedding_weights(self) -> int:
        """Embedding and head."""
        return self.num_ids * self.hidden_len * (1 if self.is_tied else 2)

    @property
    def text_weights(self) -> int:
        """Of the language model, norms left out."""
        return sum(linear.num_weights for linear in self.text) + self.embedding_weights

    @property
    def vision_weights(self) -> int:
        """Of the vision tower and its projectors."""
        return sum(linear.num_weights for linear in self.vision)

    @property
    def num_weights(self) -> int:
        """Of the whole model."""
        return self.text_weights + self.vision_weights

    @property
    def active_weights(self) -> int:
        """That one token of text passes, the head left out (it is passed where something is supervised)."""
        return sum(linear.num_active_weights for linear in self.text)

    @property
    def weight_bytes(self) -> int:
        """Of one weight."""
        return 4 if self.dtype == "float32" else 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers in two bytes each."""
        return 2 * 2 * self.num_layers * self.num_groups * self.head_len

    def adapter_weights(self, *, rank: int, is_dora: bool, with_vision: bool) -> int:
        """Of adapters on every matrix but the head."""
        linears = self.text + (self.vision if with_vision else ())
        return sum((rank * (one.num_in + one.num_out) + is_dora * one.num_out) * one.count for one in linears)


def read_shape(directory: str, *, dtype: str = "auto", key: str = "model.model") -> ModelShape:
    """Of the model in a directory, which ``key`` of the configuration names. Errors: ``shape-unknown``."""
    path = Path(directory) / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        remedy = "Name the directory of a saved Hugging Face model."
        raise ConfigError(f"no readable config.json: {error}", code="shape-unknown", key=key, remedy=remedy) from error
    text = fields.get("text_config", fields)
    size_of = partial(_size, key=key)
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    hidden, layers, heads = (size_of(text, name) for name in sizes)
    groups, head_len = text.get("num_key_value_heads") or heads, text.get("head_dim") or hidden // heads
    own_dtype = str(fields.get("dtype") or fields.get("torch_dtype") or text.get("dtype") or "float32")
    return ModelShape(
        hidden_len=hidden,
        inner_len=size_of(text, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_groups=groups,
        head_len=head_len,
        num_ids=size_of(text, "vocab_size"),
        is_tied=bool(fields.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        text=(*_attention(hidden, heads * head_len, groups * head_len, layers), *_mlp(text, hidden, layers)),
        vision=_vision(fields.get("vision_config")),
        dtype=own_dtype if dtype == "auto" else dtype,
        saved_dtype=own_dtype,
        has_dropout=any(value for name, value in text.items() if name.endswith(("dropout", "pdrop"))),
    )


def read_teachers(config: RunConfig) -> tuple[ModelShape, ...]:
    """Of each teacher that is loaded beside the policy. Errors: ``shape-unknown``."""
    named = config.custom.extra.distill.teachers
    return tuple(
        read_shape(one.model, dtype=config.model.torch_dtype, key=f"custom.extra.distill.teachers.{place}.model")
        for place, one in enumerate(named)
        if one.model is not None
    )


def _size(fields: Mapping[str, object], name: str, *, key: str = "model.model") -> int:
    value = fields.get(name)
    if not isinstance(value, int) or value < 1:
        remedy = "The planner knows decoders with the keys of Qwen3, Qwen3-VL, Llama and Mixtral-like experts."
        raise ConfigError(f"config.json has no {name}", code="shape-unknown", key=key, remedy=remedy)
    return value


def _attention(hidden: int, wide: int, narrow: int, layers: int) -> tuple[Linear, ...]:
    return (
        Linear(num_in=hidden, num_out=wide, count=layers),
        Linear(num_in=hidden, num_out=narrow, count=2 * layers),
        Linear(num_in=wide, num_out=hidden, count=layers),
    )


def _mlp(text: Mapping[str, Any], hidden: int, layers: int) -> tuple[Linear, ...]:
    experts = text.get("num_experts") or text.get("num_local_experts") or 0
    if not experts:
        inner = _size(text, "intermediate_size")
        up = Linear(num_in=hidden, num_out=inner, count=2 * layers)
        return up, Linear(num_in=inner, num_out=hidden, count=layers)
    inner, passed = (
        text.get("moe_intermediate_size") or _size(text, "intermediate_size"),
        _size(text, "num_experts_per_tok"),
    )
    return (
        Linear(num_in=hidden, num_out=inner, count=2 * layers * experts, num_active=2 * layers * passed),
        Linear(num_in=inner, num_out=hidden, count=layers * experts, num_active=layers * passed),
        Linear(num_in=hidden, num_out=experts, count=layers),
    )


def _vision(fields: Mapping[str, Any] | None) -> tuple[Linear, ...]:
    """Blocks, patches, positions and projectors of Qwen3-VL's tower."""
    if fields is None:
        return ()
    wide, inner, depth = (_size(fields, name) for name in ("hidden_size", "intermediate_size", "depth"))
    merged = wide * fields.get("spatial_merge_size", 2) ** 2
    mergers = 1 + len(fields.get("deepstack_visual_indexes", ()))
    patch = fields.get("in_channels", 3) * fields.get("temporal_patch_size", 2) * fields.get("patch_size", 16) ** 2
    return (
        Linear(num_in=wide, num_out=3 * wide, count=depth),
        Linear(num_in=wide, num_out=wide, count=depth),
        Linear(num_in=wide, num_out=inner, count=2 * depth),
        Linear(num_in=patch, num_out=wide),
        Linear(num_in=fields.get("num_position_embeddings", 0), num_out=wide),
        Linear(num_in=merged, num_out=merged, count=mergers),
        Linear(num_in=merged, num_out=fields.get("out_hidden_size", wide), count=mergers),
    )
