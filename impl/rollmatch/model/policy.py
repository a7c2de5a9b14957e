"""The policy: load it, freeze parts of it, put adapters on it."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.errors import ConfigError
from rollmatch.model.checkpoint import is_adapted

if TYPE_CHECKING:  # seconds to load; who only asks for a policy's weights needs neither
    from peft import PeftModel
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
    return cast("PeftModel", model).get_base_model() if is_adapted(model) else model


def count_weights(model: nn.Module) -> tuple[int, int]:
    """Weights in all, and those that learn."""
    sizes = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)


@contextmanager
def without_adapters(model: nn.Module, *, wanted: bool = True) -> Iterator[None]:
    """The policy as its adapters found it, while this lasts; a wrapper (DDP) may stand around it.

    Errors: ``ReferenceMissing``, where there are no adapters to leave out.
    """
    adapted = next((module for module in model.modules() if is_adapted(module)), None)
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
