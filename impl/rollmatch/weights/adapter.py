"""An adapter as servers merge it: its own tensors, what they are merged into, and the proof."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor, nn

from rollmatch.errors import SyncError
from rollmatch.model.checkpoint import checkpoint_names, merged_weights, model_key


class AdapterMissing(SyncError):
    """Only a policy with one active adapter has adapter tensors to send."""

    code = "adapter-missing"


class AdapterIncomplete(SyncError):
    """An adapter sync sends all that has learnt; weights that learn beside the adapter need a full sync."""

    code = "adapter-incomplete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Made from the policy, eaten by ``dialects.native.sender``."""

    tensors: tuple[tuple[str, Tensor], ...]
    """(name, tensor), as the merges name them."""
    merges: tuple[Mapping[str, Any], ...]
    """One per merged weight: its checkpoint name, the names of its tensors, the scaling."""
    merged_names: tuple[str, ...]
    merged: tuple[Tensor, ...]
    """[len(merged_names)] the learner's own merge."""


def adapter_of(model: nn.Module) -> Adapter:
    """The active adapter of a policy. Errors: ``AdapterMissing``, ``AdapterIncomplete``."""
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]
    if not layers:
        problem, remedy = "the policy has no adapter", "Set sync.mode to full, or tuner.train_type to lora."
        raise AdapterMissing(problem, key="tuner.train_type", remedy=remedy)
    for name, weight in model.named_parameters():
        if weight.requires_grad and "lora_" not in name:
            raise AdapterIncomplete(f"{name} learns, too", key=model_key(name), remedy="Set sync.mode to full.")
    tensors: list[tuple[str, Tensor]] = []
    merges = []
    for name, layer in layers:
        parts = list(_parts_of(layer, model_key(name)))
        tensors += [(place, tensor) for _, place, tensor in parts]
        named = {"magnitude": None} | {role: place for role, place, _ in parts}
        merges.append({"name": _name_of(model, name), "scaling": float(_scaling_of(layer)), **named})
    merged = list(islice(merged_weights(model), len(layers)))  # the merged ones come first
    return Adapter(
        tensors=tuple(tensors),
        merges=tuple(merges),
        merged_names=tuple(name for name, _ in merged),
        merged=tuple(tensor for _, tensor in merged),
    )


def _name_of(model: nn.Module, layer: str) -> str:
    """Checkpoint name of the weight that a layer's adapter is merged into. Errors: ``AdapterIncomplete``."""
    key = f"{model_key(layer)}.weight"
    name = checkpoint_names(model).name_of(key)
    if name is None:
        problem, remedy = "an adapted weight has another form in the checkpoint", "Set sync.mode to full."
        raise AdapterIncomplete(problem, key=key, remedy=remedy)
    return name


def _parts_of(layer: Any, name: str) -> Iterator[tuple[str, str, Tensor]]:
    """(role in the merge, tensor's name, tensor)."""
    active = _active_of(layer)
    yield "lora_a", f"{name}.lora_A.weight", layer.lora_A[active].weight.detach()
    yield "lora_b", f"{name}.lora_B.weight", layer.lora_B[active].weight.detach()
    if active in layer.lora_magnitude_vector:
        yield "magnitude", f"{name}.lora_magnitude_vector.weight", layer.lora_magnitude_vector[active].weight.detach()


def _scaling_of(layer: Any) -> float:
    scaling: float = layer.scaling[_active_of(layer)]
    return scaling


def _active_of(layer: Any) -> str:
    active: list[str] = list(layer.active_adapters)
    if len(active) != 1:
        problem = f"{len(active)} adapters are active, not one"
        raise AdapterMissing(problem, key="adapter", remedy="Set sync.mode to full.")
    return active[0]
