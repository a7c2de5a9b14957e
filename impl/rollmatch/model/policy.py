"""The policy and its adapters; the only door to peft.

``merged_weights`` names every weight as the Hugging Face checkpoint does, adapters merged in, without touching the
model that is being trained: merging in place and unmerging would drift the base weights a little each time.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.errors import ConfigError
from rollmatch.model.merge import Parts, merge_weight, merges_by_kernel

if TYPE_CHECKING:  # seconds to load; who only asks for a policy's weights needs neither
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

_VISION, _ALIGNER = re.compile(r"(^|\.)visual\."), re.compile(r"(^|\.)visual\.(deepstack_)?merger")


class NothingToTrain(ConfigError):
    """Some weight must be left to learn."""

    code = "nothing-to-train"


class AdapterTargetsNothing(ConfigError):
    """An adapter's regular expression matches at least one module."""

    code = "adapter-targets-nothing"


class ReferenceMissing(ConfigError):
    """The policy before training is the policy without its adapters."""

    code = "reference-missing"


class TiedHeadAdapted(ConfigError):
    """An output head that is the embedding gets no adapter: merged, the two would be different weights."""

    code = "tied-head-adapted"


def load_policy(
    config: ModelConfig, tuner: TunerConfig, *, attn_implementation: str | dict[str, str] = "sdpa"
) -> nn.Module:
    """Read the model directory, and ``prepare`` what is read. Errors: as there."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    architecture = AutoConfig.from_pretrained(config.model)
    kind = AutoModelForImageTextToText if hasattr(architecture, "vision_config") else AutoModelForCausalLM
    model: nn.Module = kind.from_pretrained(
        config.model, config=architecture, dtype=config.torch_dtype, attn_implementation=attn_implementation
    )
    return prepare(model, tuner)


def prepare(model: nn.Module, tuner: TunerConfig) -> nn.Module:
    """Freeze and adapt a model as told.

    Errors: ``AdapterTargetsNothing``, ``NothingToTrain``, ``TiedHeadAdapted``.
    """
    _freeze(model, tuner)
    if tuner.train_type == "lora":
        model = _adapt(model, tuner)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise NothingToTrain("every weight is frozen", key="tuner", remedy="Leave one of the freeze_* keys false.")
    return model


def unwrap(model: nn.Module) -> "PreTrainedModel":
    """The Hugging Face model inside an adapter wrapper."""
    return cast("PeftModel", model).get_base_model() if _is_adapted(model) else model


def count_weights(model: nn.Module) -> tuple[int, int]:
    """Weights in all, and those that learn."""
    sizes = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)


@contextmanager
def without_adapters(model: nn.Module, *, wanted: bool = True) -> Iterator[None]:
    """The policy as its adapters found it, while this lasts; a wrapper (DDP) may stand around it.

    Errors: ``ReferenceMissing``, where there are no adapters to leave out.
    """
    adapted = next((module for module in model.modules() if _is_adapted(module)), None)
    if not wanted:
        yield
    elif adapted is None:
        raise ReferenceMissing(
            "the policy has no adapters, and no other copy of it is kept",
            key="tuner.train_type",
            remedy="Set it to lora, or ask for no distance to the reference (beta 0).",
        )
    else:
        with cast("PeftModel", adapted).disable_adapter():
            yield


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of every weight, adapters merged; a tied head appears once, as the embedding.

    Bit-equal to what peft's ``merge_adapter`` leaves behind (LoRA and DoRA), but for half precision on a GPU, where
    ``merge`` says how close it is; the model stays as it is.
    """
    adapted: set[int] = set()
    for name, module in model.named_modules():
        if _is_adapter(module):
            layer = cast("LoraLayer", module)
            adapted.add(id(layer.get_base_layer().weight))
            yield f"{checkpoint_name(name)}.weight", _merged(layer)
    for name, weight in model.named_parameters():
        if id(weight) not in adapted and "lora_" not in name:
            yield checkpoint_name(name), weight.detach()


def checkpoint_name(name: str) -> str:
    """A name inside an adapter wrapper -> the name in the checkpoint.

    >>> checkpoint_name("base_model.model.model.language_model.layers.0.mlp.up_proj.base_layer.weight")
    'model.language_model.layers.0.mlp.up_proj.weight'
    """
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def _is_adapted(module: nn.Module) -> bool:
    """Whether this is peft's wrapper."""
    peft: Any = sys.modules.get("peft")  # where it was never loaded, nothing is adapted
    return peft is not None and isinstance(module, peft.PeftModel)


def _is_adapter(module: nn.Module) -> bool:
    """Whether this is a layer with adapters."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.tuners.lora.LoraLayer)


def _merged(layer: "LoraLayer") -> Tensor:
    """The layer's weight with its active adapters: what peft's merge computes, without putting the result in place."""
    merged: Tensor = layer.get_base_layer().weight.detach()
    parts = _only_parts(layer)
    if parts is not None and merges_by_kernel(merged, parts):
        return merge_weight(merged, parts)
    for adapter in layer.active_adapters:
        variant = layer.lora_variant.get(adapter)
        if variant is None:
            merged = (merged + layer.get_delta_weight(adapter)).to(merged.dtype)  # summed wide, rounded once
        else:
            merged = variant.merge_safe(layer, adapter, merged)
    return merged.detach()


def _only_parts(layer: "LoraLayer") -> Parts | None:
    """Of a linear layer with one plain LoRA or DoRA; None for all that only peft knows."""
    from peft.tuners.lora.variants import DoraLinearVariant

    adapters = list(layer.active_adapters)
    known = isinstance(layer.get_base_layer(), nn.Linear) and len(adapters) == 1
    if not known or not isinstance(layer.lora_variant.get(adapters[0]), DoraLinearVariant | None):
        return None
    (adapter,) = adapters
    is_dora = adapter in layer.lora_magnitude_vector
    return Parts(
        lora_a=layer.lora_A[adapter].weight.detach(),
        lora_b=layer.lora_B[adapter].weight.detach(),
        magnitude=layer.lora_magnitude_vector[adapter].weight.detach() if is_dora else None,
        scaling=float(layer.scaling[adapter]),
    )


def _freeze(model: nn.Module, tuner: TunerConfig) -> None:
    for name, weight in model.named_parameters():
        if _ALIGNER.search(name):
            frozen = tuner.freeze_aligner
        elif _VISION.search(name):
            frozen = tuner.freeze_vit
        else:
            frozen = tuner.freeze_llm
        weight.requires_grad_(not frozen)


def _adapt(model: nn.Module, tuner: TunerConfig) -> "PeftModel":
    from peft import LoraConfig, get_peft_model

    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv3d)]
    wanted = [name for name in names if _is_wanted(name, model, tuner)]
    if not wanted:
        raise AdapterTargetsNothing(
            f"no unfrozen module matches {tuner.target_regex!r}" if tuner.target_regex else "every module is frozen",
            key="tuner.target_regex",
            remedy=f"The whole name must match, for example {names[0] if names else 'a linear layer'}.",
        )
    _check_head(model, wanted)
    settings = LoraConfig(
        r=tuner.lora_rank,
        lora_alpha=tuner.lora_alpha,
        lora_dropout=tuner.lora_dropout,
        use_dora=tuner.use_dora,
        target_modules=wanted,
    )
    adapted: PeftModel = get_peft_model(model, settings)
    return adapted


def _is_wanted(name: str, model: nn.Module, tuner: TunerConfig) -> bool:
    """Adapters go where weights may learn: a matching, unfrozen module (the output head only if named)."""
    module = model.get_submodule(name)
    if not cast(Tensor, module.weight).requires_grad:
        return False
    if tuner.target_regex is not None:
        return re.fullmatch(tuner.target_regex, name) is not None
    return isinstance(module, nn.Linear) and module is not _head_of(model)


def _check_head(model: nn.Module, wanted: Sequence[str]) -> None:
    head, embedding = _head_of(model), model.get_input_embeddings()  # type: ignore[operator]
    if head is None or head.weight is not embedding.weight:
        return
    named = [name for name in wanted if model.get_submodule(name) is head]
    if named:
        raise TiedHeadAdapted(
            f"{named[0]} shares its weight with the embedding",
            key="tuner.target_regex",
            remedy=f"Let the expression match other modules only, for example (?!{named[0]}$).*",
        )


def _head_of(model: nn.Module) -> nn.Module | None:
    """The output head."""
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
    return head
