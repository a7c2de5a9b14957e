"""An adapter as ms-swift sends it: peft's configuration and state dict. Source: 4.6 ``rollout_mixin.py``."""

from collections.abc import Sequence

from rollmatch.dialects.swift.bodies import PeftConfig
from rollmatch.dialects.trl.bodies import FlatTensor
from rollmatch.server.announced import AnnouncementInvalid
from rollmatch.server.identity import Model
from rollmatch.server.payloads import AdapterPlan, AnnouncedMerge

_PREFIX = "base_model.model."
_PARTS = {".lora_A": "lora_a", ".lora_B": "lora_b", ".lora_magnitude_vector": "magnitude"}
_UNMERGED = (
    "modules_to_save",
    "alpha_pattern",
    "fan_in_fan_out",
    "lora_bias",
    "use_qalora",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
)
"""Options of peft under which a weight is not base + scaling * B @ A."""


def check_config(config: PeftConfig) -> None:
    """Errors: ``AnnouncementInvalid``."""
    further: dict[str, object] = config.model_extra or {}
    set_here = [name for name in _UNMERGED if further.get(name)]
    if config.bias != "none":
        set_here.append("bias")
    if set_here:
        raise _invalid("is set, and the server does not merge by it", f"peft_config.{set_here[0]}")


def adapter_plan(config: PeftConfig, tensors: Sequence[FlatTensor], model: Model) -> AdapterPlan:
    """One merge per adapted weight. Errors: ``AnnouncementInvalid``.

    peft names a tensor ``base_model.model.<module>.lora_A.weight``; the weight is ``<module>.weight``.
    """
    check_config(config)
    found: dict[str, dict[str, FlatTensor]] = {}
    for tensor in tensors:
        module, role = _place_of(tensor.name)
        found.setdefault(module, {})[role] = tensor
    merges = [_merge(config, module, parts, model) for module, parts in found.items()]
    return AdapterPlan(merges=tuple(merges))


def _merge(config: PeftConfig, module: str, parts: dict[str, FlatTensor], model: Model) -> AnnouncedMerge:
    if missing := {"lora_a", "lora_b"} - parts.keys():
        raise _invalid(f"has no {min(missing)}", module)
    name = f"{module}.weight"
    lora_a = parts["lora_a"]
    if not lora_a.shape or not lora_a.shape[0]:
        raise _invalid(f"has the shape {list(lora_a.shape)}", lora_a.name)
    return AnnouncedMerge(
        name=model.aliases.get(name, name),
        scaling=config.scaling(lora_a.shape[0]),
        **{role: tensor.name for role, tensor in parts.items()},
    )


def _place_of(name: str) -> tuple[str, str]:
    """Module and role of a tensor. Errors: ``AnnouncementInvalid``.

    >>> _place_of("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight")
    ('model.layers.0.mlp.up_proj', 'lora_a')
    """
    for part, role in _PARTS.items():
        module, found, _ = name.partition(part)
        if found:
            return module.removeprefix(_PREFIX), role
    raise _invalid("is neither lora_A nor lora_B nor a magnitude", name)


def _invalid(problem: str, key: str) -> AnnouncementInvalid:
    remedy = "Send a LoRA or DoRA of linear layers, or sync full weights (vllm_enable_lora false)."
    return AnnouncementInvalid(problem, key=key, remedy=remedy, code="adapter-invalid")
