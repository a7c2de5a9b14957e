"""Attention that keeps packed segments apart: exact, block-diagonal and causal, on any device.

Registered with transformers as ``rollmatch_packed``. When a forward call has ``cu_seq_lens_q`` (the bounds of
the segments, spelled as for FlashAttention), each segment attends to itself alone: the work is the sum of squared
lengths, nothing leaks, and no [T, T] mask exists. A flash kernel takes all segments at once where there is one
(``varlen_for``); else they go through scaled-dot-product attention one after the other. Without the bounds
(generation, KV cache, padded batches) it is transformers' ``sdpa``, mask included.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rollmatch.errors import LearnError
from rollmatch.model.images import multimodal_part

FLASH_DTYPES = (torch.bfloat16, torch.float16)
LONGEST_HEAD, HEAD_STEP = 256, 8
SOURCES = (
    "flash_attn_interface.flash_attn_varlen_func",
    "torch.nn.attention.varlen.varlen_attn",
    "flash_attn.flash_attn_varlen_func",
)
"""Where a kernel may come from, the fastest first."""
CAUSAL: tuple[tuple[str, object], ...] = (("causal", True), ("is_causal", True), ("window_size", (-1, 0)))
"""How kernels spell that a token sees those before it and itself; the first that a kernel knows is used."""
SCALE = ("softmax_scale", "scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Varlen:
    """A kernel over a row: queries [T, H, D], keys and values [T, G, D], bounds [S + 1] int32 -> [T, H, D]."""

    name: str
    call: Callable[..., Any]
    scale_word: str
    words: Mapping[str, object]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, rows: tuple[Tensor, int], scale: float) -> Tensor:
        """Causal within each segment; ``rows`` are the bounds and the length of the longest segment."""
        bounds, longest = rows
        limits = (bounds, bounds, longest, longest)
        out = self.call(query, key, value, *limits, **{self.scale_word: scale}, **self.words)
        attended: Tensor = out[0] if isinstance(out, tuple) else out
        return attended


def varlen_for(query: Tensor, *, dropout: float) -> Varlen | None:
    """The kernel for queries like these; None: attend to one segment after the other."""
    head_len = query.shape[-1]
    if not query.is_cuda or dropout or head_len > LONGEST_HEAD or head_len % HEAD_STEP:
        return None
    return installed() if working_dtype(query) in FLASH_DTYPES else None


def working_dtype(query: Tensor) -> torch.dtype:
    """What attention computes in: autocast's choice where it is on, since kernels of packages do not follow it."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


@cache
def installed() -> Varlen | None:
    """The first source that is there and takes causality and scale as arguments."""
    return next(filter(None, map(_find, SOURCES)), None)


def _find(source: str) -> Varlen | None:
    module, _, function = source.rpartition(".")
    try:
        return describe(source, getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError):
        return None


def describe(name: str, call: Callable[..., object]) -> Varlen | None:
    """A kernel by the arguments of its signature; None without causality or scale.

    >>> kernel = describe("some", lambda q, k, v, a, b, c, d, *, scale=None, window_size=(-1, -1), enable_gqa=False: q)
    >>> kernel.scale_word, kernel.words
    ('scale', {'window_size': (-1, 0), 'enable_gqa': True})
    """
    known = inspect.signature(call).parameters
    causal = next(((word, value) for word, value in CAUSAL if word in known), None)
    scale_word = next((word for word in SCALE if word in known), None)
    if causal is None or scale_word is None:
        return None
    grouped = {"enable_gqa": True} if "enable_gqa" in known else {}
    return Varlen(name=name, call=call, scale_word=scale_word, words=dict([causal]) | grouped)


PACKED_ATTENTION = "rollmatch_packed"
"""The name to give as ``attn_implementation``."""

Span = tuple[int, int]
IGNORED_BY_SDPA = ("softcap", "s_aux")
"""Arguments of attention that transformers' ``sdpa`` takes and ignores (Gemma 2, GPT-OSS)."""
STATELESS_LAYERS = frozenset(("full_attention", "dense", "sparse", "mlp", "moe"))
"""Kinds of layers (transformers' ``layer_types``) in which tokens meet in plain attention or not at all."""


class DeferredMask:
    """The arguments of a mask, passed instead of it, so that it is made only where it is needed.

    Transformers builds masks before it calls attention, from positions alone; only attention sees
    whether the row's bounds came along and made the mask superfluous.
    """

    def __init__(self, recipe: Callable[[], Tensor | None]) -> None:
        self._recipe = recipe

    @cached_property
    def tensor(self) -> Tensor | None:
        """[1, 1, T, T] bool, cooked once for all layers."""
        return self._recipe()


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | DeferredMask | None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """[B, H, T, D] queries, [B, G, T, D] keys and values -> [B, T, H, D]; the shape transformers calls for.

    Errors: ``attention-unsupported``, ``packed-bounds-invalid``, ``sliding-window-packed``.
    """
    for name in IGNORED_BY_SDPA:
        if kwargs.get(name) is not None:
            raise LearnError(
                f"{type(module).__name__} computes attention with {name}",
                code="attention-unsupported",
                key="model.attn_impl",
                remedy="Set model.attn_impl to eager, and training.packing and training.padding_free to false.",
            )
    bounds = kwargs.pop("cu_seq_lens_q", None)
    if bounds is None:
        mask = attention_mask.tensor if isinstance(attention_mask, DeferredMask) else attention_mask
        output, _ = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return output, None
    return _attend_packed(module, (query, key, value), bounds, kwargs), None


@torch.compiler.disable(reason="bounds are read as Python integers")  # type: ignore[no-untyped-call, untyped-decorator]
def _attend_packed(
    module: torch.nn.Module, states: tuple[Tensor, Tensor, Tensor], bounds: Tensor, kwargs: dict[str, Any]
) -> Tensor:
    """[1, H, T, D], [1, G, T, D] twice -> [1, T, H, D], each segment by itself; compiled layers break here."""
    query, key, value = states
    _check_packed_call(query, key, kwargs.get("sliding_window"))
    kernel = varlen_for(query, dropout=kwargs.get("dropout", 0.0))
    if kernel is not None and _is_plain(module, kwargs) and value.shape[-1] == query.shape[-1]:
        return _all_at_once(kernel, states, bounds, scale=kwargs.get("scaling"))
    parts = [
        sdpa_attention_forward(module, query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], None, **kwargs)[0]
        for a, b in spans_of(bounds, num_tokens=query.shape[2])
    ]
    return torch.cat(parts, dim=1)


def _is_plain(module: torch.nn.Module, kwargs: dict[str, object]) -> bool:
    """Whether it is causal and nothing is added to the scores."""
    given = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if given is None else given
    return bool(causal) and kwargs.get("position_bias") is None


def _all_at_once(
    kernel: Varlen, states: tuple[Tensor, Tensor, Tensor], bounds: Tensor, *, scale: float | None
) -> Tensor:
    """[1, H, T, D], [1, G, T, D] twice -> [1, T, H, D], in the dtype that attention computes in."""
    query, _, _ = states
    spans = spans_of(bounds, num_tokens=query.shape[2])
    longest = max(b - a for a, b in spans)
    dtype = working_dtype(query)
    rows = (part[0].transpose(0, 1).to(dtype) for part in states)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return kernel(*rows, rows=(bounds.to(torch.int32), longest), scale=scale)[None]


def _check_packed_call(query: Tensor, key: Tensor, sliding_window: int | None) -> None:
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise LearnError(
            f"{query.shape[0]} rows of {query.shape[2]} queries and {key.shape[2]} keys came with bounds",
            code="packed-bounds-invalid",
            key="cu_seq_lens_q",
            remedy="Pass one row, use_cache=False and no past_key_values.",
        )
    if sliding_window is not None:
        raise LearnError(
            f"this layer attends to a window of {sliding_window} tokens",
            code="sliding-window-packed",
            key="training.packing",
            remedy="Set training.packing to false.",
        )


def why_unpackable(model: torch.nn.Module) -> str:
    """What keeps a model from packed rows; empty where its attention is plain causal.

    A sliding window would be lost in packed rows, and so would the attention of image tokens to each other (Gemma 3).
    Layers with a state (linear attention, Mamba, convolutions) and attention of a model's own would not see the bounds.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    config = models[0].config
    text, part, name = config.get_text_config(), multimodal_part(model), type(config).__name__
    kinds = getattr(text, "layer_types", None)
    if any("sliding" in kind for kind in kinds or ()) or (kinds is None and getattr(text, "sliding_window", None)):
        return f"{name} attends to a window of {text.sliding_window} tokens"
    if others := sorted({*(kinds or ())} - STATELESS_LAYERS):
        return f"{name} has layers of the kind {others[0]}, which do not keep segments apart"
    if not all(one._supports_sdpa or one._supports_attention_backend for one in models if one.config in (config, text)):
        return f"{name} computes attention by itself"
    if part is not None and "token_type_ids" in inspect.signature(type(part).forward).parameters:
        return f"{name} lets the tokens of an image attend to each other"
    return ""


def check_packable(model: torch.nn.Module, *, key: str = "training.packing") -> None:
    """Reject packed rows for models whose attention is not plain causal. Errors: ``sliding-window-packed``."""
    if problem := why_unpackable(model):
        raise LearnError(problem, code="sliding-window-packed", key=key, remedy=f"Remove {key}.")


def spans_of(bounds: Tensor, *, num_tokens: int) -> tuple[Span, ...]:
    """[S + 1] bounds -> S half-open spans. Errors: ``packed-bounds-invalid``.

    Read from the device once per tensor, not once per layer: reading waits for the device.

    >>> spans_of(torch.tensor([0, 3, 5]), num_tokens=5)
    ((0, 3), (3, 5))
    """
    known: tuple[int, tuple[int, ...]] | None = getattr(bounds, "_rollmatch_bounds", None)
    if known is None or known[0] != bounds._version:
        known = (bounds._version, tuple(bounds.tolist()))
        bounds._rollmatch_bounds = known  # type: ignore[attr-defined]
    spans = tuple(pairwise(known[1]))
    if not spans or spans[0][0] != 0 or spans[-1][1] != num_tokens or any(a >= b for a, b in spans):
        raise LearnError(
            f"bounds {known[1]} do not cut a row of {num_tokens} tokens",
            code="packed-bounds-invalid",
            key="cu_seq_lens_q",
            remedy="Give 0, the end of the first segment, ..., the row's length.",
        )
    return spans


def packed_mask(**kwargs: object) -> Tensor | DeferredMask | None:
    """Transformers' sdpa mask; deferred where the call may turn out to be a packed row."""
    is_row = kwargs["batch_size"] == 1 and kwargs["q_length"] == kwargs["kv_length"]
    if is_row and kwargs.get("attention_mask") is None:
        return DeferredMask(partial(sdpa_mask, **kwargs))
    mask: Tensor | None = sdpa_mask(**kwargs)
    return mask


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch the text model to ``rollmatch_packed``; a vision tower keeps what it has."""
    has_parts = "text_config" in model.config.sub_configs
    model.set_attn_implementation({"text_config": PACKED_ATTENTION} if has_parts else PACKED_ATTENTION)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, packed_mask)
