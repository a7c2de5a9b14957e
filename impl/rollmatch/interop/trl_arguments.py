"""Arguments of TRL's trainers as our keys: ``args`` and ``peft_config``."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from rollmatch.errors import ConfigError
from rollmatch.interop.import_config import CONVERTED, convert, regex_of
from rollmatch.interop.import_script import OTHER_TRAINERS
from rollmatch.interop.import_tables import DEFAULTS, SHARED, TRL, USED_TOGETHER

LORA = {
    "r": "tuner.lora_rank",
    "lora_alpha": "tuner.lora_alpha",
    "lora_dropout": "tuner.lora_dropout",
    "use_dora": "tuner.use_dora",
    "use_rslora": "tuner.use_rslora",
    "rank_pattern": "tuner.rank_pattern",
    "alpha_pattern": "tuner.alpha_pattern",
    "trainable_token_indices": "tuner.trainable_token_indices",
}
"""Fields of peft's ``LoraConfig`` -> our keys."""
READ_OTHERWISE = ("target_modules", "modules_to_save", "task_type", "inference_mode", "peft_version")
"""Others that are read, or that say nothing about the weights."""


DERIVED = frozenset(
    {
        "generation_batch_size",
        "num_generations_eval",
        "accelerator_config",
        "debug",
        "fsdp_config",
        "use_cpu",
        "no_cuda",
        "disable_tqdm",
    }
)
"""Fields that TRL or transformers computes from others, or that say what the machine is."""


OF_OBJECTIVE = {
    *("loss_type", "importance_sampling_level", "multi_objective_aggregation", "sync_ref_model", "min_p"),
    *("use_adaptive_entropy", "off_policy_mask_threshold", "generation_kwargs", "vllm_structured_outputs_regex"),
    "model_init_kwargs.quantization_config",
}
"""Fields that change what is learnt: where they have no counterpart, they are not left out."""
FORMER = {"tokenizer": "processing_class", "dataset": "train_dataset"}
"""Arguments by the names of older versions of TRL, and of people -> today's."""


def keys_of_args(args: object) -> tuple[dict[str, object], dict[str, str]]:
    """Our dotted keys, and what has no counterpart with its reason.

    ``args``: TRL's GRPOConfig, of which the fields that differ from its defaults count. Batches count completions
    there, prompts here. Errors: ``argument-unknown``, those of ``convert``.
    """
    if not is_dataclass(args):
        problem, remedy = f"is {type(args).__name__}", "Pass a GRPOConfig of TRL, or our keys as config."
        raise ConfigError(problem, code="argument-unknown", key="args", remedy=remedy)
    if hasattr(args, "max_staleness"):
        remedy = "Pass a GRPOConfig, and overlap in config: docs/guides/coming-from.md has each of its arguments."
        raise ConfigError(f"is {type(args).__name__}", code="argument-unknown", key="args", remedy=remedy)
    if "GRPOConfig" not in (named := [each.__name__ for each in type.mro(type(args))]):
        remedy = next((OTHER_TRAINERS[name] for name in named if name in OTHER_TRAINERS), "Pass a GRPOConfig of TRL.")
        raise ConfigError(f"is {type(args).__name__}", code="argument-unknown", key="args", remedy=remedy)
    made = convert("trl", _changed(args))
    for name in OF_OBJECTIVE & made.left_out.keys():
        remedy = "Leave it out: the run learns otherwise than with TRL."
        raise ConfigError(made.left_out[name], code="argument-unknown", key=f"args.{name}", remedy=remedy)
    return made.keys, made.changed | made.left_out


def keys_of_defaults(model: str) -> tuple[dict[str, object], dict[str, str]]:
    """As ``keys_of_args`` of the GRPOConfig that TRL makes for a model where none is passed."""
    made = convert("trl", {"output_dir": f"{model.rstrip('/').rpartition('/')[2]}-GRPO"})
    return made.keys, made.changed | made.left_out


def _changed(args: Any) -> dict[str, object]:
    """Fields that do not have their default."""
    found = {
        each.name: getattr(args, each.name)
        for each in fields(args)
        if each.init and each.name not in DERIVED and getattr(args, each.name) != _default_of(each)
    }
    found = {name: getattr(value, "value", value) for name, value in found.items()}  # enumerations of transformers
    if "report_to" in found:
        found["report_to"] = list(found["report_to"]) or "none"
    return found | {"output_dir": args.output_dir}


def _default_of(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def keys_of_peft(peft_config: Any) -> dict[str, object]:
    """Our dotted keys. Errors: ``argument-unknown`` for other adapters than LoRA, and for fields that nothing uses."""
    if str(getattr(peft_config, "peft_type", "")).rpartition(".")[2] != "LORA":
        problem = f"is {type(peft_config).__name__}"
        raise ConfigError(problem, code="argument-unknown", key="peft_config", remedy="Pass a LoraConfig.")
    plain = type(peft_config)()
    for name in (each.name for each in fields(plain) if each.name not in LORA and each.name not in READ_OTHERWISE):
        if getattr(peft_config, name) != getattr(plain, name):
            remedy = f"Leave it out; {', '.join(LORA)}, target_modules and modules_to_save are used."
            raise ConfigError("has no counterpart", code="argument-unknown", key=f"peft_config.{name}", remedy=remedy)
    keys = {key: getattr(peft_config, name) for name, key in LORA.items() if getattr(peft_config, name)}
    targets = peft_config.target_modules
    if isinstance(targets, str) and targets != "all-linear":
        keys["tuner.target_regex"] = targets
    elif targets and not isinstance(targets, str):
        keys["tuner.target_regex"] = regex_of(sorted(targets))
    if peft_config.modules_to_save:
        keys["tuner.modules_to_save"] = list(peft_config.modules_to_save)
    return keys | {"tuner.train_type": "lora"}


_CLASS = "a class with reset, step, clone and fingerprint, named: config={'environment.name': 'my_envs:Class'}."
BY_NAME = {
    "rollout_func": f"Write turns as an environment, {_CLASS}",
    "quantization_config": "Leave it out: weights of 4 and 8 bits are not trained here.",
    "ref_model": "Leave it out: the reference is the model before training, for grpo.beta above 0.",
    "optimizers": "Name the optimizer in args: GRPOConfig(optim=...).",
    "data_collator": "Leave it out: batches are made of prompts.",
    "compute_metrics": "Pass it as a reward of weight 0, whose mean is logged.",
    "reward_processing_classes": "Leave it out, and pass a function that calls the reward model.",
}
"""Arguments of TRL's trainer without a counterpart -> what to do."""


OF_CONFIG = {*SHARED, *TRL, *CONVERTED, *USED_TOGETHER, *DEFAULTS["trl"]}
"""Fields of TRL's configurations that are read."""


def check_others(given: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuse arguments that nothing here uses. Errors: ``argument-unknown``."""
    for name, value in given.items():
        if value is not None:
            close = [FORMER[name]] if name in FORMER else get_close_matches(name, known)
            remedy = f"Did you mean {close[0]}?" if close else "Leave it out; all settings of a run are keys of config."
            if name in OF_CONFIG and name not in FORMER:
                remedy = f"Pass it in args: GRPOConfig({name}=...)."
            remedy = BY_NAME.get(name, remedy)
            raise ConfigError("has no counterpart", code="argument-unknown", key=name, remedy=remedy)
