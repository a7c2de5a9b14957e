"""All weights of the policy by checkpoint name, or its adapter alone, however the learner's ranks share them.

DDP: every rank has them all. FSDP2 and DeepSpeed ZeRO-3: each weight is gathered when its turn comes, and nobody keeps
it. Every rank must iterate over sharded weights, because ranks wait for each other in the gathers; on their way to
servers these go to rank 0 alone.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rollmatch.errors import SyncError
from rollmatch.model.adapters import adapter_layers, is_adapted, is_plain_lora, model_key
from rollmatch.model.checkpoint import (
    CheckpointNames,
    base_weights,
    checkpoint_names,
    checkpoint_tensors,
    merged_weights,
)
from rollmatch.model.sharding import is_sharded
from rollmatch.weights.plan import Merge, Spec, spec_of

_FULL = "Set sync.mode to full."


class AdapterNotSendable(SyncError):
    """A policy has more than one active adapter, or something beside it learns.

    ``code``: ``adapter-missing`` or ``adapter-incomplete``.
    """

    code = "adapter-missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter as servers merge it. Made from the policy, sent by ``dialects.native.sender``."""

    tensors: tuple[tuple[str, Tensor], ...]
    """(name, tensor), as the merges name them."""
    merges: tuple[Merge, ...]
    """One per merged weight."""
    merged: Iterable[Tensor]
    """[len(merges)] the learner's own merge, each made when its turn comes; the policy must not change before."""
    base: Iterable[tuple[str, Tensor]]
    """(checkpoint name, tensor) of all weights without the adapter, each made when its turn comes."""


@runtime_checkable
class ListedWeights(Protocol):
    """Weights that can be listed before they are made."""

    def specs(self) -> Sequence[Spec] | None:
        """In the order in which they come; None where none has to be made, or they cannot be listed."""

    def gather_in(self, types: Mapping[str, torch.dtype]) -> None:
        """Types in which the next iteration may make weights of these names; it is not an error if it does not."""


class NamedWeights:
    """Iterates over (checkpoint name, tensor), adapters merged.

    Tensors of a sharded model are copies; others may be the policy's own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = _without_wrapper(model)
        self._types: Mapping[str, torch.dtype] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold parts, so that all of them must iterate."""
        return is_sharded(self.model)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        types = [self._types]
        if self.is_sharded:
            dist.broadcast_object_list(types, 0)  # ranks gather alike, as rank 0 sends them
        yield from merged_weights(self.model, *types)

    def specs(self) -> list[Spec] | None:
        """Name, type and shape of each, in order, before one is gathered or merged; None where all are in memory."""
        if not self.is_sharded and not is_adapted(self.model) and not adapter_layers(self.model):
            return None
        return [spec_of(*pair) for pair in checkpoint_tensors(self.model)]

    def gather_in(self, types: Mapping[str, torch.dtype]) -> None:
        """In which rank 0 gathers weights of these names for itself, as it says before anybody iterates."""
        self._types = types

    def adapter(self) -> Adapter:
        """The adapter alone. Errors: ``AdapterNotSendable``."""
        return adapter_of(self.model)


def named_weights(model: nn.Module) -> NamedWeights:
    """The weights as they are when they are iterated over, not as they are now."""
    return NamedWeights(model)


def largest_rank(model: nn.Module) -> int | None:
    """Of a policy's LoRA layers; None where it has none."""
    layers = (cast(Any, module) for module in model.modules() if hasattr(module, "lora_A"))
    return max((rank for layer in layers for rank in layer.r.values()), default=None)


def adapter_of(model: nn.Module) -> Adapter:
    """The active adapter of a policy. Errors: ``AdapterNotSendable``."""
    layers = adapter_layers(model)
    if not layers:
        remedy = "Set sync.mode to full, or tuner.train_type to lora."
        raise AdapterNotSendable("the policy has no adapter", key="tuner.train_type", remedy=remedy)
    for name, layer in layers:
        if not is_plain_lora(layer):
            problem = f"{type(layer).__name__} is no plain LoRA or DoRA, or merged, or off"
            raise AdapterNotSendable(problem, key=model_key(name), remedy=_FULL, code="adapter-incomplete")
    for name, weight in model.named_parameters():
        if (weight.requires_grad and "lora_" not in name) or ".modules_to_save." in name:
            problem = f"{name} changes beside the adapter"
            raise AdapterNotSendable(problem, key=model_key(name), remedy=_FULL, code="adapter-incomplete")
    tensors: list[tuple[str, Tensor]] = []
    merges, names = [], checkpoint_names(model)
    for name, layer in layers:
        merge, parts = _merge_of(layer, model_key(name), _weight_name(names, name))
        merges.append(merge)
        tensors += parts
    merged, base = _MergedLayers(model, len(layers)), _WithoutAdapter(model)
    return Adapter(tensors=tuple(tensors), merges=tuple(merges), merged=merged, base=base)


@dataclass(frozen=True, slots=True)
class _WithoutAdapter:
    """All weights of a policy, its adapter left out."""

    model: nn.Module

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return base_weights(self.model)


@dataclass(frozen=True, slots=True)
class _MergedLayers:
    """Merged weights of a policy, which come before all others."""

    model: nn.Module
    number: int

    def __iter__(self) -> Iterator[Tensor]:
        return (tensor for _, tensor in islice(merged_weights(self.model), self.number))


def _merge_of(layer: Any, name: str, weight_name: str) -> tuple[Merge, list[tuple[str, Tensor]]]:
    """How the weight of peft's ``LoraLayer`` is merged, and the tensors this takes."""
    actives = list(layer.active_adapters)
    if len(actives) != 1:
        raise AdapterNotSendable(f"{len(actives)} adapters are active, not one", key="adapter", remedy=_FULL)
    (active,) = actives
    names = {"lora_a": f"{name}.lora_A.weight", "lora_b": f"{name}.lora_B.weight"}
    modules: dict[str, Any] = {"lora_a": layer.lora_A[active], "lora_b": layer.lora_B[active]}
    if active in layer.lora_magnitude_vector:
        names["magnitude"] = f"{name}.lora_magnitude_vector.weight"
        modules["magnitude"] = layer.lora_magnitude_vector[active]
    merge = Merge(name=weight_name, scaling=float(layer.scaling[active]), **names)
    return merge, [(names[role], module.weight.detach()) for role, module in modules.items()]


def _weight_name(names: CheckpointNames, layer: str) -> str:
    """Checkpoint name of the weight that a layer's adapter is merged into. Errors: ``AdapterNotSendable``."""
    key = f"{model_key(layer)}.weight"
    name = names.name_of(key)
    if name is None:
        problem = "an adapted weight has another form in the checkpoint"
        raise AdapterNotSendable(problem, key=key, remedy=_FULL, code="adapter-incomplete")
    return name


def _without_wrapper(model: nn.Module) -> nn.Module:
    """The policy without what DDP or DeepSpeed put around it."""
    deepspeed: Any = sys.modules.get("deepspeed")
    wrappers = (DistributedDataParallel, *([deepspeed.DeepSpeedEngine] if deepspeed else []))
    return cast(nn.Module, model.module) if isinstance(model, wrappers) else model
