"""How learner ranks share the policy: ``training.strategy``, and the files that it may name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rollmatch.config.yaml_dialect import Tree, parse_mapping
from rollmatch.errors import ConfigError, ErrorList

KEY = "training.strategy"
FSDP2: Mapping[str, object] = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
"""``fsdp_config`` of ``transformers.TrainingArguments``."""
FSDP2_KEYS = ("version", "reshard_after_forward", "cpu_offload", "transformer_layer_cls_to_wrap")
"""Keys of a file for FSDP2, with or without ``fsdp_`` before them."""
ROW_KEYS = ("sequence_parallel_size", "tensor_parallel")
"""Keys of DeepSpeed's by which ranks would share rows or layers: here each learns from whole rows of its own."""
DEEPSPEED: Mapping[str, object] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
"""A DeepSpeed configuration whose values follow ``training``."""
_REMEDY = f"Use ddp, fsdp2, deepspeed_zero2, deepspeed_zero3, or a file: DeepSpeed's JSON, or {', '.join(FSDP2_KEYS)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A strategy with its settings, as ``transformers.TrainingArguments`` takes them."""

    engine: Literal["ddp", "fsdp2", "deepspeed"]
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def stage(self) -> int:
        """DeepSpeed: 1 splits optimizer state, 2 gradients, too, and 3 weights, too; else 0."""
        zero = self.settings.get("zero_optimization")
        return int(str(zero.get("stage", 0))) if isinstance(zero, dict) else 0

    @property
    def splits_weights(self) -> bool:
        """Whether a rank holds parts of the weights only."""
        return self.engine == "fsdp2" or self.stage == 3


def read_strategy(name: str) -> Strategy:
    """The strategy of a name or a file. Errors: ``strategy-unknown``, ``strategy-key-unused``.

    >>> read_strategy("deepspeed_zero2").stage, read_strategy("fsdp2").splits_weights, read_strategy("ddp").stage
    (2, True, 0)
    """
    if name == "ddp":
        return Strategy(engine="ddp")
    if name == "fsdp2":
        return Strategy(engine="fsdp2", settings=FSDP2)
    if name in ("deepspeed_zero2", "deepspeed_zero3"):
        zero: dict[str, object] = {"stage": int(name[-1])}
        if name.endswith("3"):
            zero |= {"stage3_gather_16bit_weights_on_model_save": True}
        return Strategy(engine="deepspeed", settings={**DEEPSPEED, "zero_optimization": zero})
    return _of_file(name)


def _of_file(name: str) -> Strategy:
    try:
        tree = parse_mapping(Path(name).read_text(encoding="utf-8"), origin=name)
    except (OSError, UnicodeDecodeError, ErrorList) as error:
        reason = error.errors[0].problem if isinstance(error, ErrorList) else "no strategy and no readable file"
        raise ConfigError(f"{name}: {reason}", code="strategy-unknown", key=KEY, remedy=_REMEDY) from error
    if "distributed_type" in tree:
        problem = f"{name} configures accelerate launch"
        remedy = f"Name a file with its fsdp_config alone ({', '.join(FSDP2_KEYS)}), or DeepSpeed's JSON."
        raise ConfigError(problem, code="strategy-key-unused", key=KEY, remedy=remedy)
    if isinstance(tree.get("zero_optimization"), dict):
        if shared := [key for key in ROW_KEYS if key in tree]:
            remedy = "Remove it; for long rows set training.gradient_checkpointing, or train adapters."
            raise ConfigError(f"{name}: {shared[0]} is not used", code="strategy-key-unused", key=KEY, remedy=remedy)
        return Strategy(engine="deepspeed", settings=tree)
    return Strategy(engine="fsdp2", settings={**_checked(tree, name), **FSDP2})


def _checked(tree: Tree, name: str) -> Tree:
    """Settings of FSDP2, names without their prefix."""
    settings = {key.removeprefix("fsdp_"): value for key, value in tree.items()}
    unused = [key for key in settings if key not in FSDP2_KEYS]
    if unused or settings.get("version", 2) != 2:
        problem = f"{name}: {unused[0]} is not used" if unused else f"{name}: version must be 2"
        raise ConfigError(problem, code="strategy-key-unused", key=KEY, remedy=_REMEDY)
    return settings
