"""The parts of a model that are frozen apart: language model, vision tower, projector.

Found by transformers' own accessors, ``get_decoder`` and ``get_encoder``; there is none for the projector.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, cast

from torch import nn

from rollmatch.config.training import TunerConfig
from rollmatch.errors import ConfigError
from rollmatch.model.adapters import model_key

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Part(StrEnum):
    """The value is the key of ``tuner`` that freezes the part."""

    LANGUAGE = "freeze_llm"
    VISION = "freeze_vit"
    PROJECTOR = "freeze_aligner"


NAMES = {Part.LANGUAGE: "language model", Part.VISION: "vision tower", Part.PROJECTOR: "projector"}
_IN_TOWER = re.compile(r"(^|\.)(merger|deepstack_merger_list|downsample)(\.|$)")
"""Projectors that stand inside a vision tower (Qwen-VL, GLM-V)."""
_BESIDE_TOWER = re.compile(
    r"(^|\.)(multi_modal_projector|connector|aligner|mm_projector|embed_vision|image_newline)(\.|$)"
)
"""Projectors that stand beside it, and LLaVA's learned line break."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCount:
    """Tensors of one part."""

    num_tensors: int
    num_trained: int


def freeze(model: "PreTrainedModel", tuner: TunerConfig) -> None:
    """Freeze the named parts. Errors: ``nothing-frozen``, ``part-unknown``."""
    frozen = [part for part in Part if getattr(tuner, part)]
    parts = dict(parts_of(model))
    for part in frozen:
        if part not in parts.values():
            problem = f"{type(model).__name__} has no {NAMES[part]}"
            raise ConfigError(problem, code="nothing-frozen", key=f"tuner.{part}", remedy="Set it to false.")
    unknown = [name for name, part in parts.items() if part is None]
    if frozen and unknown:
        problem = f"{type(model).__name__} has {len(unknown)} weights of no known part, first {unknown[0]}"
        remedy = "Set the freeze_* keys to false, or train adapters."
        raise ConfigError(problem, code="part-unknown", key=f"tuner.{frozen[0]}", remedy=remedy)
    for name, weight in model.named_parameters():
        weight.requires_grad_(parts[name] not in frozen)


def count_parts(model: nn.Module, base: nn.Module) -> Mapping[str, PartCount]:
    """Tensors of each part that exists, adapters with the module they are on; ``base`` is the model in ``model``."""
    if not hasattr(base, "get_decoder"):
        return {}
    parts = dict(parts_of(cast("PreTrainedModel", base)))
    counts: dict[str, list[bool]] = {}
    for name, weight in model.named_parameters():
        key = model_key(name)
        module = re.split(r"\.(?:lora_|modules_to_save|trainable_tokens_|original_module)", key)[0]
        part = parts.get(key) or next((p for other, p in parts.items() if other.startswith(f"{module}.")), None)
        counts.setdefault(NAMES[part] if part else "other", []).append(weight.requires_grad)
    return {name: PartCount(num_tensors=len(trained), num_trained=sum(trained)) for name, trained in counts.items()}


def parts_of(model: "PreTrainedModel") -> Iterator[tuple[str, Part | None]]:
    """(key, part) of each parameter; None of one that no accessor knows."""
    tower = _ids_of(_own(model, model.get_encoder(modality="image")))
    text = _ids_of(_own(model, model.get_decoder())) | _ids_of(model.get_output_embeddings())
    for name, weight in model.named_parameters():
        key = model_key(name)
        if id(weight) in tower:
            yield key, Part.PROJECTOR if _IN_TOWER.search(key) else Part.VISION
        elif _BESIDE_TOWER.search(key):
            yield key, Part.PROJECTOR
        elif id(weight) in text or not tower:
            yield key, Part.LANGUAGE
        else:
            yield key, None


def _own(model: "PreTrainedModel", found: object) -> nn.Module | None:
    """A sub-module; None where the accessor found nothing and returned the model itself."""
    nothing = (model, model.base_model, getattr(model, "model", None))
    return None if any(found is each for each in nothing) else cast("nn.Module | None", found)


def _ids_of(module: nn.Module | None) -> set[int]:
    return set() if module is None else {id(weight) for weight in module.parameters()}
