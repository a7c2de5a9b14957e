"""The policy: load it, freeze parts of it, put adapters on it."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from rollmatch.config.files import quantized
from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.errors import ConfigError, first_line
from rollmatch.model.adapters import check_mergeable, is_adapted
from rollmatch.model.parts import freeze
from rollmatch.model.sharding import changeable, is_sharded, meta_of
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.model.weight_files import read_header

if TYPE_CHECKING:  # seconds to load, which naming weights does not need
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel


ADAPTABLE = (nn.Linear, nn.Conv2d, nn.Conv3d)
"""Modules that may get an adapter."""
LARGE_VOCABULARY = 32_768
"""Ids from which on logits are worth avoiding on a CPU, too."""


def load_policy(
    config: ModelConfig, tuner: TunerConfig, *, attn_implementation: str | dict[str, str] = "sdpa"
) -> nn.Module:
    """Read the model directory, and ``prepare`` what is read.

    Errors: ``base-quantized``, ``model-unreadable``, ``weights-damaged``, and as there.
    """
    architecture = load_architecture(config.model)
    if getattr(architecture, "quantization_config", None) is not None:
        raise quantized(config.model)
    options = {"dtype": config.torch_dtype, "attn_implementation": attn_implementation}
    try:
        kind = auto_class(architecture)
        model: nn.Module = kind.from_pretrained(config.model, config=architecture, trust_remote_code=False, **options)
    except UnpicklingError as error:
        problem, remedy = "its pickled weights hold more than tensors", "Name a model with safetensors."
        raise ConfigError(problem, code="weights-damaged", key="model.model", remedy=remedy) from error
    return prepare(_with_adapter(model, config, tuner), tuner)


def load_architecture(directory: str) -> "PretrainedConfig":
    """transformers' configuration of a model; code that it names is not run. Errors: ``model-unreadable``."""
    from transformers import AutoConfig

    try:
        architecture: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # classes of any model check what a file says by errors of their own
        problem, remedy = f"{directory}: {first_line(error)}", "Name a model of a kind that transformers itself has."
        raise ConfigError(problem, code="model-unreadable", key="model.model", remedy=remedy) from error
    return architecture


def auto_class(architecture: "PretrainedConfig") -> Any:
    """transformers' class for a model of this kind: with or without a vision tower."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hasattr(architecture, "vision_config") else AutoModelForCausalLM


def _with_adapter(model: nn.Module, config: ModelConfig, tuner: TunerConfig) -> nn.Module:
    """With the adapter that a run starts from, merged or to be trained further."""
    if config.adapter is None:
        return model
    from peft import PeftModel

    continues = _continues(config, tuner)
    adapted = PeftModel.from_pretrained(cast("PreTrainedModel", model), config.adapter, is_trainable=continues)
    check_mergeable(adapted)
    if continues:
        return cast(nn.Module, adapted)
    _merge_split(adapted)
    merged: nn.Module = adapted.merge_and_unload()
    return merged


def check_adapter(model: nn.Module, directory: Path) -> nn.Module:
    """Compare the headers of an adapter's files with what peft expects for this model, and return it adapted.

    Errors: ``adapter-unfit``.
    """
    import peft
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    described = peft.PeftConfig.from_pretrained(str(directory))
    described.inference_mode = False  # as it is saved; else nothing is trained
    base, described.base_model_name_or_path = described.base_model_name_or_path, str(model.name_or_path)
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING.get(described.peft_type, "")  # what peft ties has other names in files
    headers = [read_header(path)[0] for path in directory.glob("adapter_model*.safetensors")]
    held = {name: tuple(tensor["shape"]) for header in headers for name, tensor in header.items()}
    try:
        adapted = peft.get_peft_model(cast("PreTrainedModel", model), described)
    except ValueError as error:
        raise _unfit(directory, base, first_line(error)) from error
    state = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name in sorted(held.keys() | wanted.keys()) if held else ():
        has, needs = held.get(name), wanted.get(name)
        if has != needs and (prefix in name or None not in (has, needs)):
            shapes = f"{name} is {list(has or ()) or 'missing'} in its file, and {list(needs or ()) or 'nothing'} here"
            raise _unfit(directory, base, shapes)
    return cast(nn.Module, adapted)


def _unfit(directory: Path, base: str | None, problem: str) -> ConfigError:
    remedy = f"Name the model that it was trained on: {base}."
    return ConfigError(
        f"{directory} does not fit the model: {problem}", code="adapter-unfit", key="model.adapter", remedy=remedy
    )


def _merge_split(adapted: nn.Module) -> None:
    """Merge adapters into weights that ranks hold in parts, layer by layer; peft skips what is merged already."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in adapted.modules() if is_sharded(adapted) else ():
        if isinstance(layer, BaseTunerLayer):
            with changeable(layer):
                layer.merge()


def _continues(config: ModelConfig, tuner: TunerConfig) -> bool:
    return config.adapter_start == "continue" and tuner.train_type == "lora"


def prepare(model: nn.Module, tuner: TunerConfig) -> nn.Module:
    """Freeze and adapt a model; one that brings an adapter to train further stays as it is.

    Errors: ``adapter-targets-nothing``, ``nothing-to-train``, ``tied-head-adapted``, those of ``freeze``.
    """
    if is_adapted(model):
        return model
    freeze(cast("PreTrainedModel", model), tuner)
    if tuner.train_type == "lora":
        model = _adapt(model, tuner)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ConfigError(
            "every weight is frozen",
            code="nothing-to-train",
            key="tuner",
            remedy="Leave one of the freeze_* keys false.",
        )
    return model


def load_adapters(model: nn.Module, checkpoint: Path, config: ModelConfig, tuner: TunerConfig) -> nn.Module:
    """The model as saved in a directory, with the adapters of a checkpoint, and below them the adapter that its run
    had merged before (``model.adapter``), which the checkpoint does not hold.
    """
    from peft import PeftModel

    start = model if _continues(config, tuner) else _with_adapter(model, config, tuner)
    adapted: nn.Module = PeftModel.from_pretrained(cast("PreTrainedModel", start), checkpoint)
    return adapted


def unwrap(model: nn.Module) -> "PreTrainedModel":
    """The Hugging Face model inside an adapter wrapper."""
    return cast("PeftModel", model).get_base_model() if is_adapted(model) else model


def head_worth_avoiding(model: nn.Module) -> nn.Module | None:
    """The output head, where its logits are too large to be made; None where they may as well be."""
    head = _head_of(unwrap(model))
    weight = None if head is None else next(head.parameters())
    return head if weight is not None and (weight.is_cuda or len(meta_of(weight)) >= LARGE_VOCABULARY) else None


def count_weights(model: nn.Module) -> tuple[int, int]:
    """Weights in all, and those that learn."""
    sizes = [(meta_of(weight).numel(), weight.requires_grad) for weight in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)


@contextmanager
def without_adapters(model: nn.Module, *, wanted: bool) -> Iterator[None]:
    """The policy as its adapters found it, while this lasts; a wrapper (DDP) may stand around it.

    Errors: ``reference-missing``, where there are no adapters to leave out.
    """
    adapted = next((module for module in model.modules() if is_adapted(module)), None)
    if not wanted:
        yield
    elif adapted is None:
        raise ConfigError(
            "the policy has no adapters, and no other copy of it is kept",
            code="reference-missing",
            key="tuner.train_type",
            remedy="Set it to lora, or set beta to 0, which needs no reference.",
        )
    else:
        with cast("PeftModel", adapted).disable_adapter():
            yield


def _adapt(model: nn.Module, tuner: TunerConfig) -> "PeftModel":
    from peft import LoraConfig, get_peft_model

    names = [name for name, module in model.named_modules() if isinstance(module, ADAPTABLE)]
    wanted = [name for name in names if _is_wanted(name, model, tuner)]
    if not wanted:
        raise ConfigError(
            f"no unfrozen module matches {tuner.target_regex!r}" if tuner.target_regex else "every module is frozen",
            code="adapter-targets-nothing",
            key="tuner.target_regex",
            remedy=f"The whole name must match, for example {names[0] if names else 'a linear layer'}.",
        )
    _check_head(model, wanted)
    _check_patterns(model, wanted, tuner)
    beside: dict[str, object] = {
        "modules_to_save": list(tuner.modules_to_save) or None,
        "trainable_token_indices": _trained_tokens(model, tuner),
        "rank_pattern": dict(tuner.rank_pattern),
        "alpha_pattern": dict(tuner.alpha_pattern),
        "ensure_weight_tying": bool(tuner.modules_to_save) and _is_tied(model),
    }
    settings = LoraConfig(
        r=tuner.lora_rank,
        lora_alpha=tuner.lora_alpha,
        lora_dropout=tuner.lora_dropout,
        use_dora=tuner.use_dora,
        use_rslora=tuner.use_rslora,
        target_modules=wanted,
        **beside,
    )
    adapted: PeftModel = get_peft_model(model, settings)
    check_mergeable(adapted)
    return adapted


def _trained_tokens(model: nn.Module, tuner: TunerConfig) -> list[int] | dict[str, list[int]] | None:
    """As peft takes it: a head that is not the embedding has rows of its own for the coordinate tokens."""
    indices = tuner.trainable_token_indices
    if indices != "coord_tokens":
        return indices or None
    ids = list(Vocabulary.load(model.name_or_path).coord_ids)  # type: ignore[arg-type]
    embedding, head = model.get_input_embeddings(), _head_of(model)  # type: ignore[operator]
    if head is None or _is_tied(model):
        return ids
    return {name.rpartition(".")[2]: ids for name, module in model.named_modules() if module in (embedding, head)}


def _check_patterns(model: nn.Module, wanted: Sequence[str], tuner: TunerConfig) -> None:
    """peft ignores a name that matches nothing. Errors: ``adapter-targets-nothing``."""
    patterns = [("rank_pattern", name) for name in tuner.rank_pattern]
    patterns += [("alpha_pattern", name) for name in tuner.alpha_pattern]
    missed = [(key, name) for key, name in patterns if not any(re.search(rf"(^|\.)({name})$", w) for w in wanted)]
    modules = [name for name, _ in model.named_modules()]
    saved = tuner.modules_to_save
    missed += [("modules_to_save", name) for name in saved if not any(module.endswith(name) for module in modules)]
    for key, name in missed:
        problem, remedy = f"{name!r} matches no module", f"Use the end of a module's name, such as {wanted[0]}."
        raise ConfigError(problem, code="adapter-targets-nothing", key=f"tuner.{key}", remedy=remedy)


def _is_tied(model: nn.Module) -> bool:
    head, embedding = _head_of(model), model.get_input_embeddings()  # type: ignore[operator]
    return head is not None and head.weight is embedding.weight


def _is_wanted(name: str, model: nn.Module, tuner: TunerConfig) -> bool:
    """Adapters go where weights may learn: a matching, unfrozen module (the output head only if named)."""
    module = model.get_submodule(name)
    if not cast(Tensor, module.weight).requires_grad:
        return False
    if tuner.target_regex is not None:
        return re.fullmatch(tuner.target_regex, name) is not None
    return isinstance(module, nn.Linear) and module is not _head_of(model)


def _check_head(model: nn.Module, wanted: Sequence[str]) -> None:
    if not _is_tied(model):
        return
    head = _head_of(model)
    named = [name for name in wanted if model.get_submodule(name) is head]
    if named:
        raise ConfigError(
            f"{named[0]} shares its weight with the embedding",
            code="tied-head-adapted",
            key="tuner.target_regex",
            remedy=f"Let the expression match other modules only, for example (?!{named[0]}$).*",
        )


def _head_of(model: nn.Module) -> nn.Module | None:
    """The output head."""
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
    return head
