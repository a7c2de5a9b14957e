"""Every weight of a policy under its name in the checkpoint, adapters merged.

Names are those that ``save_pretrained`` would write, by transformers' own reverse conversion: they follow the files
that were loaded, and one tensor of the model may be many in the checkpoint (experts) or one of a group (fused q, k, v).
The model stays as it is: merging in place and unmerging would drift the base weights a little each time.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollmatch.model.adapters import Source, adapted_sources, adapter_layers, base_of, is_of_adapter, model_key
from rollmatch.model.sharding import each_whole, meta_of, shape_of, whole

if TYPE_CHECKING:  # seconds to load
    from transformers import PreTrainedModel

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class CheckpointNames:
    """In-memory keys of a model -> names and shapes in its checkpoint.

    >>> names = CheckpointNames(nn.Linear(2, 3), {"weight": torch.zeros(3, 2)})
    >>> names.name_of("weight")
    'weight'
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """``tensors``: all of the model's; only their shapes and types are read."""
        self.model = model
        self._names: dict[str, str] = {}
        """Keys of tensors that are only renamed."""
        self._converted: set[str] = set()
        """Keys of tensors that become others, each by itself."""
        self._transposed = _transposed_patterns(model)
        metas = {key: torch.empty_like(tensor, device="meta") for key, tensor in tensors.items()}
        whole = {name: tensor.shape for name, tensor in self._revert(dict(metas)).items()}
        for key, meta in metas.items():
            self._learn(key, meta, whole)

    def name_of(self, key: str) -> str | None:
        """The name of a tensor that is the same in the checkpoint; None where it is cut, joined or transposed."""
        name = self._names.get(key)
        return None if name is None or self._is_transposed(name) else name

    def is_separate(self, key: str) -> bool:
        """Whether a tensor is converted by itself."""
        return key in self._names or key in self._converted

    def convert(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """(key, tensor) of the model -> (name, tensor) of the checkpoint, one by one; joined ones come last."""
        waiting: dict[str, Tensor] = {}
        for key, tensor in tensors:
            if key in self._names:
                yield self._laid_out(self._names[key], tensor)
            elif key in self._converted:
                yield from (self._laid_out(*made) for made in self._revert({key: tensor}).items())
            else:
                waiting[key] = tensor
            del tensor  # not kept while the next one is gathered
        if waiting:
            yield from (self._laid_out(*made) for made in self._revert(waiting).items())

    def _learn(self, key: str, meta: Tensor, whole: Mapping[str, torch.Size]) -> None:
        """Whether a tensor can be converted without the others: what comes of it is part of the whole."""
        try:
            made = self._revert({key: meta})
        except (ValueError, KeyError, RuntimeError):  # it is joined with others
            return
        if any(whole.get(name) != tensor.shape for name, tensor in made.items()):
            return
        match list(made.items()):
            case [(name, tensor)] if tensor is meta:
                self._names[key] = name
            case _:
                self._converted.add(key)

    def _revert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not hasattr(self.model, "save_pretrained"):
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        made: dict[str, Tensor] = revert_weight_conversion(cast("PreTrainedModel", self.model), tensors)
        return made

    def _is_transposed(self, name: str) -> bool:
        return any(pattern in name for pattern in self._transposed)

    def _laid_out(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        """In the layout of published files, which is the one that vLLM reads."""
        return name, tensor.transpose(1, 2).contiguous() if self._is_transposed(name) else tensor


def _transposed_patterns(model: nn.Module) -> tuple[str, ...]:
    """Parts of names whose tensors transformers transposes when it reads them, but not when it writes them.

    ``Transpose(check_dims=True)`` compares a tensor with the model's parameter, so its reverse does nothing: experts of
    Qwen3-VL-MoE would be sent as [E, 2I, H] under names that stand for [E, H, 2I] in published files.
    """
    if not hasattr(model, "save_pretrained"):
        return ()
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    known = get_model_conversion_mapping(cast("PreTrainedModel", model), add_legacy=False)
    converters = [each for each in known if isinstance(each, WeightConverter)]
    checked = [c for c in converters if any(isinstance(op, Transpose) and op.check_dims for op in c.operations)]
    return tuple(str(pattern) for converter in checked for pattern in converter.source_patterns)


_KNOWN = "_checkpoint_names"
"""Attribute of a model, found once: finding out takes milliseconds per tensor. A table beside it would keep models."""


def checkpoint_names(model: nn.Module) -> CheckpointNames:
    """The names of a policy's weights, in or without an adapter wrapper, as its shapes are now."""
    return _names_of(model, dict(model_tensors(model)))


def _names_of(model: nn.Module, tensors: Mapping[str, Tensor]) -> CheckpointNames:
    base = base_of(model)
    shapes = tuple((key, shape_of(tensor)) for key, tensor in tensors.items())
    known: tuple[Shapes, CheckpointNames] | None = getattr(base, _KNOWN, None)
    if known is None or known[0] != shapes:
        metas = {key: meta_of(tensor) for key, tensor in tensors.items()}
        known = shapes, CheckpointNames(base, metas)
        setattr(base, _KNOWN, known)
    return known[1]


@torch.no_grad()
def merged_weights(model: nn.Module, types: Mapping[str, torch.dtype] | None = None) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of every weight, adapters merged; tied weights appear once.

    Those with LoRA come first. Bit-equal to what peft's ``merge_adapter`` leaves behind, except for LoRA and DoRA in
    half precision on a GPU, where ``merge`` states the difference. Where ranks hold parts, each weight is gathered when
    its turn comes: all ranks iterate to the end. For a rank 0 that sends them, such weights come in ``types``, by name,
    to travel as fewer bytes, and other ranks get tensors without memory.
    """
    kept = dict(model_tensors(model))
    names = _names_of(model, kept)
    wanted = types or {}
    chosen = {key: wanted.get(names.name_of(key) or "", tensor.dtype) for key, tensor in kept.items()}
    place = "meta" if types is not None and dist.get_rank() > 0 else None
    sources = _sources(model, kept, chosen, to_first=types is not None)
    yield from names.convert((key, make().to(place)) for key, _, make in sources)


@torch.no_grad()
def base_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of every weight as it is without adapters; tied weights appear once."""
    kept = dict(model_tensors(model))
    yield from _names_of(model, kept).convert((key, whole(weight)) for key, weight in kept.items())


def model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(key in the plain model, tensor) of all that ``save_pretrained`` writes, adapters left out, tied weights once."""
    ignored = set(getattr(base_of(model), "_keys_to_ignore_on_save", None) or ())
    layers = frozenset(name for name, _ in adapter_layers(model))
    for name, weight in _saved_tensors(model):
        key = model_key(name).replace(".original_module.", ".")
        if key not in ignored and not is_of_adapter(name, layers):
            yield key, weight


def checkpoint_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor without memory) of every weight: what ``merged_weights`` will yield, in its order."""
    kept = dict(model_tensors(model))
    own = {key: tensor.dtype for key, tensor in kept.items()}
    yield from _names_of(model, kept).convert((key, meta) for key, meta, _ in _sources(model, kept, own))


def _saved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, tied ones once, then buffers. One pass: adapters make thousands of modules, and servers wait."""
    seen, buffers = set[int](), list[tuple[str, Tensor]]()
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, weight in module._parameters.items():
            if weight is not None and id(weight) not in seen:
                seen.add(id(weight))
                yield start + name, weight
        hidden = module._non_persistent_buffers_set
        buffers += [(start + name, buffer) for name, buffer in module._buffers.items() if name not in hidden]
    yield from ((name, buffer) for name, buffer in buffers if buffer is not None)


def _sources(
    model: nn.Module, kept: Mapping[str, Tensor], types: Mapping[str, torch.dtype], *, to_first: bool = False
) -> Iterator[Source]:
    """Of ``model_tensors``: what adapters replace, then everything else, gathered in ``types`` where it is split."""
    replaced = set[str]()
    for source in adapted_sources(model, kept, to_first=to_first):
        replaced.add(source[0])
        yield source
    others = {key: weight for key, weight in kept.items() if key not in replaced}
    made = each_whole(((weight, types[key]) for key, weight in others.items()), to_first=to_first)
    yield from ((key, meta_of(weight), partial(next, made)) for key, weight in others.items())
