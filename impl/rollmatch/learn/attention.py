"""Attention that keeps packed segments apart: exact, block-diagonal and causal, on any device.

Registered with transformers as ``rollmatch_packed``. When a forward call has ``cu_seq_lens_q`` (the bounds of
the pieces, spelled as for FlashAttention), each piece attends to itself alone: the work is the sum of squared
lengths, nothing leaks, and no [T, T] mask exists. A piece with more keys (``cu_seq_lens_k``) than queries also attends
to a prompt that stands before it in the row once for several. A flash kernel takes all pieces at once where there is
one (``varlen_for``); else they go through scaled-dot-product attention one after the other. Without the bounds
(generation, KV cache, padded batches) it is transformers' ``sdpa``, mask included.

``pieces`` beside the bounds says the same as Python integers: nothing waits for the device, and a compiled layer with
a flash kernel is one graph.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
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

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, pieces: "Pieces", scale: float) -> Tensor:
        """Causal within each piece: its last query sees all keys that it attends to, the one before all but one."""
        limits = (*pieces.bounds, *pieces.longest)
        out = self.call(query, key, value, *limits, **{self.scale_word: scale}, **self.words)
        attended: Tensor = out[0] if isinstance(out, tuple) else out
        return attended


def varlen_for(query: Tensor, *, dropout: float) -> Varlen | None:
    """The kernel for queries like these; None: attend to one segment after the other."""
    head_len = query.shape[-1]
    if not query.is_cuda or dropout or head_len > LONGEST_HEAD or head_len % HEAD_STEP:
        return None
    return INSTALLED if working_dtype(query) in FLASH_DTYPES else None


def working_dtype(query: Tensor) -> torch.dtype:
    """What attention computes in: autocast's choice where it is on, since kernels of packages do not follow it."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


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


def _find(source: str) -> Varlen | None:
    module, _, function = source.rpartition(".")
    try:
        return describe(source, getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError):
        return None


INSTALLED = next(filter(None, map(_find, SOURCES)), None)
"""The kernel of the first source that is there and takes causality and scale as arguments."""
PACKED_ATTENTION = "rollmatch_packed"
"""The name to give as ``attn_implementation``."""

Span = tuple[int, int]
IGNORED_BY_SDPA = ("softcap", "s_aux")
"""Arguments of attention that transformers' ``sdpa`` takes and ignores (Gemma 2, GPT-OSS)."""
STATELESS_LAYERS = frozenset(("full_attention", "dense", "sparse", "mlp", "moe"))
"""Kinds of layers (transformers' ``layer_types``) in which tokens attend to each other plainly or not at all."""


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
    **kwargs: Any,
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
    bounds, seen = kwargs.pop("cu_seq_lens_q", None), kwargs.pop("cu_seq_lens_k", None)
    pieces = kwargs.pop("pieces", None)
    states = query, key, value
    if bounds is None:
        mask = attention_mask.tensor if isinstance(attention_mask, DeferredMask) else attention_mask
        output, _ = sdpa_attention_forward(module, *states, mask, **kwargs)
        return output, None
    _check_packed_call(query, key, kwargs.get("sliding_window"))
    if pieces is None:
        seen = bounds if seen is None else seen
        pieces = pieces_of((bounds, seen), num_tokens=query.shape[2], device=query.device)
    kernel = varlen_for(query, dropout=kwargs.get("dropout", 0.0))
    if kernel is not None and _is_plain(module, kwargs) and value.shape[-1] == query.shape[-1]:
        return _all_at_once(kernel, states, pieces, scale=kwargs.get("scaling")), None
    return _one_by_one(module, states, pieces, kwargs), None


@torch.compiler.disable(reason="pieces are cut by Python integers")  # type: ignore[no-untyped-call, untyped-decorator]
def _one_by_one(
    module: torch.nn.Module, states: tuple[Tensor, Tensor, Tensor], pieces: "Pieces", kwargs: dict[str, Any]
) -> Tensor:
    """[1, H, T, D], [1, G, T, D] twice -> [1, T, H, D]; compiled layers break here."""
    query, key, value = states
    parts = [
        sdpa_attention_forward(
            module, query[:, :, a:b], _seen(key, before, (a, b)), _seen(value, before, (a, b)), mask, **kwargs
        )[0]
        for (a, b), before, mask in pieces.each(query.device)
    ]
    return torch.cat(parts, dim=1)


def _seen(states: Tensor, before: Span | None, own: Span) -> Tensor:
    """[1, G, T, D] -> [1, G, K, D] that a piece attends to: the shared prompt before it, and its own."""
    part = states[:, :, slice(*own)]
    return part if before is None else torch.cat([states[:, :, slice(*before)], part], dim=2)


def _is_plain(module: torch.nn.Module, kwargs: dict[str, object]) -> bool:
    """Whether it is causal and nothing is added to the scores."""
    given = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if given is None else given
    return bool(causal) and kwargs.get("position_bias") is None


def _all_at_once(
    kernel: Varlen, states: tuple[Tensor, Tensor, Tensor], pieces: "Pieces", *, scale: float | None
) -> Tensor:
    """[1, H, T, D], [1, G, T, D] twice -> [1, T, H, D], in the dtype that attention computes in."""
    query, _, _ = states
    dtype = working_dtype(query)
    queries, *seen = (part[0].transpose(0, 1).to(dtype) for part in states)
    if pieces.seen is not None:
        repeats = pieces.seen
        seen = [_repeated(part, repeats.order, repeats.places, repeats.starts) for part in seen]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return kernel(queries, *seen, pieces=pieces, scale=scale)[None]


@torch.library.custom_op("rollmatch::repeated", mutates_args=())
def _repeated(rows: Tensor, order: Tensor, places: Tensor, starts: Tensor) -> Tensor:
    """[T, G, D] -> [K, G, D] as ``Seen`` says. An operator, since torch keeps no graph with an autograd function in
    its cache."""
    return rows[order]


@_repeated.register_fake
def _(rows: Tensor, order: Tensor, *_: Tensor) -> Tensor:
    return rows.new_empty(order.shape[0], *rows.shape[1:])


def _keep_places(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[2:])


def _add_repeated(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    """The gradients of a row are added as a bag of embeddings: in float32, in one order, by one kernel."""
    places, starts = ctx.saved_tensors
    total = functional.embedding_bag(places, grad.flatten(1), starts, mode="sum")
    return total.view(-1, *grad.shape[1:]), None, None, None


_repeated.register_autograd(_add_repeated, setup_context=_keep_places)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Keys or values of a row, those of a shared prompt once for each piece that attends to it."""

    order: Tensor
    """[K] indices in the row."""
    places: Tensor
    """[K] where each token of the row stands in ``order``, token by token."""
    starts: Tensor
    """[T] where each token's places begin in ``places``."""

    @classmethod
    def of(cls, order: Tensor) -> "Seen":
        """The inverse of an order in which every token is at least once.

        >>> seen = Seen.of(torch.tensor([0, 1, 0, 1, 2]))
        >>> seen.places.tolist(), seen.starts.tolist()
        ([0, 2, 1, 3, 4], [0, 2, 4])
        """
        counts = torch.bincount(order)
        return cls(order=order, places=order.argsort(stable=True), starts=counts.cumsum(0) - counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """How a row of T tokens attends: each piece to itself, and some to a shared prompt before."""

    bounds: tuple[Tensor, Tensor]
    """[S + 1] int32 of the pieces, and of what each attends to, one after the other."""
    longest: tuple[int, int]
    """Tokens of the longest piece, and most tokens that one attends to."""
    own: tuple[Span, ...]
    """[S] half-open spans in the row."""
    before: tuple[Span | None, ...]
    """[S] the shared prompt that a piece attends to, too."""
    seen: "Seen | None"
    """What the pieces attend to, one after the other; None: the row as it is."""

    def each(self, device: torch.device) -> Iterator[tuple[Span, Span | None, Tensor | None]]:
        """Of each piece its span, its prompt's, and where causality needs one [1, 1, Q, K] a mask."""
        for (a, b), before in zip(self.own, self.before, strict=True):
            mask = None
            if before is not None:
                shape = b - a, before[1] - before[0] + b - a
                mask = torch.ones(shape, dtype=torch.bool, device=device).tril(shape[1] - shape[0])[None, None]
            yield (a, b), before, mask


@torch.compiler.disable(reason="bounds are read as Python integers")  # type: ignore[no-untyped-call, untyped-decorator]
def pieces_of(bounds: tuple[Tensor, Tensor], *, num_tokens: int, device: torch.device | None = None) -> Pieces:
    """What [S + 1] bounds of queries and of keys say; a piece with more keys than queries attends to the last piece
    before it that has as many. Reading waits for the bounds' device; ``device`` is where the pieces are wanted.
    Errors: ``packed-bounds-invalid``.

    >>> bounds = torch.tensor([0, 3, 5, 6, 8]), torch.tensor([0, 3, 8, 12, 14])  # 3 tokens; 2 and 1 after them; 2
    >>> pieces = pieces_of(bounds, num_tokens=8)
    >>> pieces.before
    (None, (0, 3), (0, 3), None)
    >>> pieces.seen.order.tolist()
    [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    """
    own, seen = (tuple(pairwise(part.tolist())) for part in bounds)
    before: list[Span | None] = []
    prompt: Span = (0, 0)
    if len(own) != len(seen) or not own or own[0][0] != 0 or own[-1][1] != num_tokens or any(a >= b for a, b in own):
        raise _cut_wrongly(bounds, num_tokens)
    for (a, b), (c, d) in zip(own, seen, strict=True):
        num_before = (d - c) - (b - a)
        prompt = prompt if num_before else (a, b)
        before.append(prompt if num_before else None)
        if num_before not in (0, prompt[1] - prompt[0]):
            raise _cut_wrongly(bounds, num_tokens)
    keys = None
    if any(before):
        spans = chain.from_iterable(zip((span or (0, 0) for span in before), own, strict=True))
        keys = Seen.of(torch.cat([torch.arange(*span) for span in spans]).to(device))
    longest = max(b - a for a, b in own), max(d - c for c, d in seen)
    kept = bounds[0].to(device, torch.int32), bounds[1].to(device, torch.int32)
    return Pieces(bounds=kept, longest=longest, own=own, before=tuple(before), seen=keys)


def _cut_wrongly(bounds: tuple[Tensor, Tensor], num_tokens: int) -> LearnError:
    return LearnError(
        f"bounds {bounds[0].tolist()}, of keys {bounds[1].tolist()}, do not cut a row of {num_tokens} tokens",
        code="packed-bounds-invalid",
        key="cu_seq_lens_q",
        remedy="Give 0, the end of the first piece, ..., the row's length; keys of a piece are its own, or also all of "
        "the last piece before it with keys of its own alone.",
    )


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
