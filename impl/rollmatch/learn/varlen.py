"""Flash kernels that take all segments of a row in one launch, and when they may.

They know bfloat16 and float16 on a GPU, heads of up to 256 numbers, no dropout, and grouped heads as they are. In
order of preference: FlashAttention 3 where its package is installed, torch's own variable-length attention (no
package at all), FlashAttention 2.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

FLASH_DTYPES = (torch.bfloat16, torch.float16)
LONGEST_HEAD, HEAD_STEP = 256, 8
SOURCES = (
    "flash_attn_interface.flash_attn_varlen_func",
    "torch.nn.attention.varlen.varlen_attn",
    "flash_attn.flash_attn_varlen_func",
)
"""Where a kernel may come from, the fastest first."""
CAUSAL: tuple[tuple[str, Any], ...] = (("causal", True), ("is_causal", True), ("window_size", (-1, 0)))
"""How kernels spell that a token sees those before it and itself; the first that a kernel knows is used."""
SCALE = ("softmax_scale", "scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Varlen:
    """A kernel over a row: queries [T, H, D], keys and values [T, G, D], bounds [S + 1] int32 -> [T, H, D]."""

    name: str
    call: Callable[..., Any]
    scale_word: str
    words: Mapping[str, Any]

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
    """The first source that is there and lets causality and scale be told."""
    return next(filter(None, map(_find, SOURCES)), None)


def _find(source: str) -> Varlen | None:
    module, _, function = source.rpartition(".")
    try:
        return describe(source, getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError):
        return None


def describe(name: str, call: Callable[..., Any]) -> Varlen | None:
    """A kernel by what its signature lets be told; None where causality or scale cannot be.

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
