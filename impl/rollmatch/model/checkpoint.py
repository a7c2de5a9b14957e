"""Every weight of a policy under its name in the checkpoint, adapters merged.

Names are those that ``save_pretrained`` would write, by transformers' own reverse conversion: they follow the files
that were loaded, and one tensor of the model may be many in the checkpoint (experts) or one of a group (fused q, k, v).
The model stays as it is: merging in place and unmerging would drift the base weights a little each time.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollmatch.model.merge import LoraFactors, merge_weight, merges_by_kernel
from rollmatch.model.sharding import each_whole, gathered, is_sharded, meta_of, shape_of, split_in, whole

if TYPE_CHECKING:  # seconds to load
    from peft.tuners.lora import LoraLayer
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.utils import ModulesToSaveWrapper
    from transformers import PreTrainedModel

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
Source = tuple[str, Tensor, Callable[[], Tensor]]
"""Key in the plain model, the tensor without memory, what makes it."""
_OF_ADAPTERS = (".modules_to_save.", "lora_", "trainable_tokens_")
"""Parts of the names of peft's own tensors."""


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


_KNOWN: WeakKeyDictionary[nn.Module, tuple[Shapes, CheckpointNames]] = WeakKeyDictionary()
"""Of each model, found once: finding out takes milliseconds per tensor."""


def checkpoint_names(model: nn.Module) -> CheckpointNames:
    """The names of a policy's weights, in or without an adapter wrapper, as its shapes are now."""
    return _names_of(model, dict(model_tensors(model)))


def _names_of(model: nn.Module, tensors: Mapping[str, Tensor]) -> CheckpointNames:
    base = _base_of(model)
    shapes = tuple((key, shape_of(tensor)) for key, tensor in tensors.items())
    known = _KNOWN.get(base)
    if known is None or known[0] != shapes:
        metas = {key: meta_of(tensor) for key, tensor in tensors.items()}
        known = _KNOWN[base] = (shapes, CheckpointNames(base, metas))
    return known[1]


@torch.no_grad()
def merged_weights(model: nn.Module, types: Mapping[str, torch.dtype] | None = None) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of every weight, adapters merged; tied weights appear once.

    Those with LoRA come first. Bit-equal to what peft's ``merge_adapter`` leaves behind (LoRA and DoRA), except in half
    precision on a GPU, where ``merge`` states the difference. Where ranks hold parts, each weight is gathered when its
    turn comes: all ranks iterate to the end. For a rank 0 that sends them, such weights come in ``types``, by name, to
    travel as fewer bytes, and other ranks get tensors without memory.
    """
    kept = dict(model_tensors(model))
    names = _names_of(model, kept)
    wanted = types or {}
    chosen = {key: wanted.get(names.name_of(key) or "", tensor.dtype) for key, tensor in kept.items()}
    place = "meta" if types is not None and dist.get_rank() > 0 else None
    sources = _sources(model, kept, chosen, to_first=types is not None)
    yield from names.convert((key, make().to(place)) for key, _, make in sources)


def model_key(name: str) -> str:
    """A name inside an adapter wrapper -> the key in the plain model.

    >>> model_key("base_model.model.model.language_model.layers.0.mlp.up_proj.base_layer.weight")
    'model.language_model.layers.0.mlp.up_proj.weight'
    """
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".token_adapter", "")


def model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(key in the plain model, tensor) of all that ``save_pretrained`` writes, adapters left out, tied weights once."""
    ignored = set(getattr(_base_of(model), "_keys_to_ignore_on_save", None) or ())
    for name, weight in _saved_tensors(model):
        key = model_key(name).replace(".original_module.", ".")
        if key not in ignored and not any(part in name for part in _OF_ADAPTERS):
            yield key, weight


def checkpoint_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor without memory) of every weight: what ``merged_weights`` will yield, in its order."""
    kept = dict(model_tensors(model))
    own = {key: tensor.dtype for key, tensor in kept.items()}
    yield from _names_of(model, kept).convert((key, meta) for key, meta, _ in _sources(model, kept, own))


def is_adapted(model: nn.Module) -> bool:
    """Whether this is peft's wrapper."""
    peft: Any = sys.modules.get("peft")  # where it was never loaded, nothing is adapted
    return peft is not None and isinstance(model, peft.PeftModel)


def _base_of(model: nn.Module) -> nn.Module:
    base: nn.Module = cast("Any", model).get_base_model() if is_adapted(model) else model
    return base


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
    for source in _adapted_sources(model, kept, to_first=to_first) if is_adapted(model) else ():
        replaced.add(source[0])
        yield source
    others = {key: weight for key, weight in kept.items() if key not in replaced}
    made = each_whole(((weight, types[key]) for key, weight in others.items()), to_first=to_first)
    yield from ((key, meta_of(weight), partial(next, made)) for key, weight in others.items())


def _adapted_sources(model: nn.Module, kept: Mapping[str, Tensor], *, to_first: bool) -> Iterator[Source]:
    """Of the weights in ``kept``: a tied head is not among them."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.utils import ModulesToSaveWrapper

    kinds = LoraLayer, TrainableTokensLayer, ModulesToSaveWrapper
    modules = [(model_key(name), module) for name, module in model.named_modules() if isinstance(module, kinds)]
    loras = [module for _, module in modules if isinstance(module, LoraLayer)]
    make_merged = _maker(_merged, loras, to_first=to_first) if is_sharded(model) else _merged
    for key, module in modules:
        if isinstance(module, LoraLayer):
            yield f"{key}.weight", meta_of(module.get_base_layer().weight), partial(make_merged, module)
    for key, module in modules:
        if isinstance(module, TrainableTokensLayer) and (name := f"{key}.weight") in kept:
            make = _maker(_with_trained_rows, [module]) if is_sharded(model) else _with_trained_rows
            yield name, meta_of(kept[name]), partial(make, module)
        elif isinstance(module, ModulesToSaveWrapper):
            copies = ((f"{key}.{name}", weight) for name, weight in _trained_copy(module))
            yield from ((name, meta_of(copy), partial(whole, copy)) for name, copy in copies if name in kept)


def _maker(
    make: Callable[[Any], Tensor], layers: Sequence[nn.Module], *, to_first: bool = False
) -> Callable[[Any], Tensor]:
    """``make`` of layers that ranks hold in parts, one after the other; a rank that gets no weights makes none."""
    split = ((weight, weight.dtype) for layer in layers for *_, weight in split_in(layer))
    wholes = each_whole(split, to_first=to_first)

    def make_whole(layer: Any) -> Tensor:
        with gathered(layer, wholes):
            base: Tensor = layer.get_base_layer().weight.detach()
            return base if base.is_meta else make(layer)

    return make_whole


def _with_trained_rows(layer: "TrainableTokensLayer") -> Tensor:
    merged: Tensor = layer.get_merged_weights(list(layer.active_adapters))
    return merged.detach()


def _trained_copy(wrapper: "ModulesToSaveWrapper") -> Iterator[tuple[str, Tensor]]:
    yield from wrapper.modules_to_save[wrapper.active_adapters[0]].named_parameters()


def _merged(layer: "LoraLayer") -> Tensor:
    """The layer's weight with its active adapters: what peft's merge computes, without putting the result in place."""
    merged: Tensor = layer.get_base_layer().weight.detach()
    factors = _factors_of(layer)
    if factors is not None and (not merged.is_cuda or merges_by_kernel(merged, factors)):
        return merge_weight(merged, factors)
    for adapter in layer.active_adapters:
        variant = layer.lora_variant.get(adapter)
        if variant is None:
            merged = (merged + layer.get_delta_weight(adapter)).to(merged.dtype)  # summed wide, rounded once
        else:
            merged = variant.merge_safe(layer, adapter, merged)
    return merged.detach()


def _factors_of(layer: "LoraLayer") -> LoraFactors | None:
    """Of a linear layer with one plain LoRA or DoRA; None for all that only peft knows."""
    from peft.tuners.lora.variants import DoraLinearVariant

    adapters = list(layer.active_adapters)
    known = isinstance(layer.get_base_layer(), nn.Linear) and len(adapters) == 1
    if not known or not isinstance(layer.lora_variant.get(adapters[0]), DoraLinearVariant | None):
        return None
    (adapter,) = adapters
    is_dora = adapter in layer.lora_magnitude_vector
    return LoraFactors(
        lora_a=layer.lora_A[adapter].weight.detach(),
        lora_b=layer.lora_B[adapter].weight.detach(),
        magnitude=layer.lora_magnitude_vector[adapter].weight.detach() if is_dora else None,
        scaling=float(layer.scaling[adapter]),
    )
