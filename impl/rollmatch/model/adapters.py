"""peft's adapters in a policy: which tensors are theirs, and what the policy's own weights become with them.

A weight is what the forward pass applies: with the active adapters, or without any where they are off or merged
already. LoRA and DoRA of linear layers and convolutions are computed here, all other kinds by peft's own merge in a
copy of their layer. What no plain weight can express is an error: prompts, a bias where the layer has none, one of two
tied weights.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from rollmatch.errors import ConfigError, SyncError
from rollmatch.model.merge import LoraFactors, merge_weight, merges_by_kernel
from rollmatch.model.sharding import each_whole, gathered, is_sharded, meta_of, split_in, whole

if TYPE_CHECKING:  # seconds to load
    from peft.tuners.lora import LoraLayer
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.utils import ModulesToSaveWrapper

Source = tuple[str, Tensor, Callable[[], Tensor]]
"""Key in the plain model, the tensor without memory, what makes it."""
_COPIES = ".modules_to_save."
"""Part of the names of peft's trained copies of modules."""


def is_adapted(model: nn.Module) -> bool:
    """Whether this is peft's wrapper."""
    peft: Any = sys.modules.get("peft")  # where it was never loaded, nothing is adapted
    return peft is not None and isinstance(model, peft.PeftModel)


def base_of(model: nn.Module) -> nn.Module:
    """The model inside peft's wrapper, or the model itself."""
    base: nn.Module = cast("Any", model).get_base_model() if is_adapted(model) else model
    return base


def model_key(name: str) -> str:
    """A name inside an adapter wrapper -> the key in the plain model.

    >>> model_key("base_model.model.model.language_model.layers.0.mlp.up_proj.base_layer.weight")
    'model.language_model.layers.0.mlp.up_proj.weight'
    """
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".token_adapter", "")


def adapter_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """(name, layer) of all modules that peft has put an adapter on; none where peft was never loaded."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def is_of_adapter(name: str, layers: frozenset[str]) -> bool:
    """Whether a tensor belongs to an adapter; ``layers``: names of the modules that have one.

    >>> [is_of_adapter(f"m.q.{name}", frozenset({"m.q"})) for name in ("base_layer.weight", "lora_A.default.weight")]
    [False, True]
    """
    parts = name.split(".")
    places = (place for place in range(1, len(parts)) if parts[place] != "base_layer") if layers else ()
    return _COPIES in name or any(".".join(parts[:place]) in layers for place in places)


def check_mergeable(model: nn.Module) -> None:
    """Raise where adapters are no change of plain weights. Errors: ``adapter-not-mergeable``, ``tied-head-adapted``."""
    if not is_adapted(model):
        return
    from peft.tuners.tuners_utils import BaseTuner

    adapted = cast("Any", model)
    if not isinstance(adapted.base_model, BaseTuner):
        kind = adapted.peft_config[adapted.active_adapter].peft_type
        problem = f"an adapter of type {getattr(kind, 'value', kind)} changes no weights"
        raise SyncError(
            problem,
            code="adapter-not-mergeable",
            key="model.adapter",
            remedy="Use LoRA, or another kind that can be merged.",
        )
    base: Any = base_of(model)
    head, embedding = (getattr(base, f"get_{end}put_embeddings", lambda: None)() for end in ("out", "in"))
    if head is None or embedding is None or _own_weight(head) is not _own_weight(embedding):
        return
    if _effect_on(head) != _effect_on(embedding):
        raise ConfigError(
            "the output head and the embedding are one weight, and an adapter changes one of the two",
            code="tied-head-adapted",
            key="tuner",
            remedy="Adapt neither, or both alike: the embedding by trainable_token_indices or modules_to_save.",
        )


def _own_weight(module: Any) -> object:
    """The weight below adapters."""
    while (inner := getattr(module, "original_module", None) or getattr(module, "base_layer", None)) is not None:
        module = inner
    return getattr(module, "weight", None)


def _effect_on(module: Any) -> object:
    """What adapters make of a module's weight, comparable: equal where they make the same."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.utils import ModulesToSaveWrapper

    layer = getattr(module, "token_adapter", module)
    if isinstance(layer, TrainableTokensLayer):
        return id(next(iter((layer.tied_adapter or layer).trainable_tokens_delta.values()), None))
    if isinstance(module, ModulesToSaveWrapper):
        copy_of = _trained_copy(module)
        return None if copy_of is None else id(copy_of.weight)
    return None if _own_weight(module) is getattr(module, "weight", None) and not _is_layer(module) else id(module)


def _is_layer(module: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def adapted_sources(model: nn.Module, kept: Mapping[str, Tensor], *, to_first: bool) -> Iterator[Source]:
    """Of the weights in ``kept`` (a tied head is not among them), those that adapters replace. Errors:
    ``adapter-not-mergeable``, ``tied-head-adapted``.
    """
    layers = adapter_layers(model)
    if not layers and not is_adapted(model):
        return
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.utils import ModulesToSaveWrapper

    check_mergeable(model)
    split = is_sharded(model)
    named = [(model_key(name), layer) for name, layer in layers if not isinstance(layer, TrainableTokensLayer)]
    plain = [layer for _, layer in named if is_plain_lora(layer)]
    make_merged = _maker(_merged, plain, to_first=to_first) if split else _merged
    for key, layer in named:
        if is_plain_lora(layer):
            yield f"{key}.weight", meta_of(layer.get_base_layer().weight), partial(make_merged, layer)
    innermost = {
        key: layer for key, layer in reversed(named) if not is_plain_lora(layer)
    }  # wrappers of one module nest
    for key, layer in innermost.items():
        if split:
            problem = f"{type(layer).__name__} cannot be merged while ranks share the weights"
            raise SyncError(problem, code="adapter-not-mergeable", key=key, remedy="Set training.strategy to ddp.")
        for name, weight in layer.get_base_layer().named_parameters():
            if f"{key}.{name}" in kept:
                yield f"{key}.{name}", meta_of(weight), partial(_merged_by_peft, layer, name, key)
    for name, module in model.named_modules():
        key = model_key(name)
        if isinstance(module, TrainableTokensLayer) and (weight_key := f"{key}.weight") in kept:
            make = _maker(_with_trained_rows, [module]) if split else _with_trained_rows
            yield weight_key, meta_of(kept[weight_key]), partial(make, module)
        elif isinstance(module, ModulesToSaveWrapper) and (trained := _trained_copy(module)) is not None:
            copies = ((f"{key}.{inner}", weight) for inner, weight in trained.named_parameters())
            yield from ((inner, meta_of(copy), partial(whole, copy)) for inner, copy in copies if inner in kept)


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
    actives = [name for name in layer.active_adapters if name in layer.trainable_tokens_delta]
    if layer.disable_adapters or layer.merged or not actives:
        return cast("Tensor", _merged_base(layer).weight).detach()
    merged: Tensor = layer.get_merged_weights(actives)
    return merged.detach()


def _trained_copy(wrapper: "ModulesToSaveWrapper") -> Any:
    """The copy that the forward pass uses; None where that is the module itself."""
    actives = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
    return None if wrapper.disable_adapters or not actives else wrapper.modules_to_save[actives[0]]


def is_plain_lora(layer: Any) -> bool:
    """Whether a layer has LoRA or DoRA of a linear layer or convolution, on and not merged, and no bias of its own."""
    from peft.tuners import lora

    if type(layer) not in (lora.Linear, lora.Conv2d, lora.Conv3d) or layer.merged or layer.disable_adapters:
        return False
    return not any(layer.lora_bias.get(name) for name in layer.active_adapters)


def _merged(layer: "LoraLayer") -> Tensor:
    """The layer's weight with its active adapters: what peft's merge computes, without putting the result in place."""
    merged: Tensor = layer.get_base_layer().weight.detach()
    factors = _factors_of(layer)
    if factors is not None and (not merged.is_cuda or merges_by_kernel(merged, factors)):
        return merge_weight(merged, factors)
    for adapter in actives_of(layer):
        variant = layer.lora_variant.get(adapter)
        if variant is None:
            merged = (merged + layer.get_delta_weight(adapter)).to(merged.dtype)  # summed wide, rounded once
        else:
            merged = variant.merge_safe(layer, adapter, merged)
    return merged.detach()


def actives_of(layer: "LoraLayer") -> list[str]:
    """Active adapters that this layer has: another one may be on other layers."""
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _merged_by_peft(layer: Any, name: str, key: str) -> Tensor:
    """A parameter of the layer's base with what the forward pass adds. Errors: ``adapter-not-mergeable``."""
    try:
        return cast("Tensor", _merged_base(layer).get_parameter(name)).detach()
    except (NotImplementedError, AttributeError, RuntimeError, ValueError, TypeError) as error:
        problem = f"peft cannot merge {type(layer).__module__}.{type(layer).__name__}: {error}"
        remedy = "Leave the adapter out of this module, or use another kind."
        raise SyncError(problem, code="adapter-not-mergeable", key=key, remedy=remedy) from error


def _merged_base(layer: Any) -> nn.Module:
    """The base layer as the forward pass applies it: itself, or that of a merged (or unmerged) copy."""
    if bool(layer.merged) == (not layer.disable_adapters):
        base: nn.Module = layer.get_base_layer()
        return base
    made = inner = copy.deepcopy(layer)
    while _is_layer(inner):  # wrappers of several parameters of one module stand around each other
        if inner.disable_adapters:
            inner.unmerge()
        else:
            inner.merge()
        inner = inner.base_layer
    merged: nn.Module = made.get_base_layer()
    return merged


def _factors_of(layer: "LoraLayer") -> LoraFactors | None:
    """Of a linear layer with one plain LoRA or DoRA; None for all that only peft knows."""
    from peft.tuners.lora.variants import DoraLinearVariant

    adapters = actives_of(layer)
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
