"""What does not go together with ``training.strategy``."""

from collections.abc import Iterator

from rollmatch.config import effective
from rollmatch.config.findings import ROLLOUT_MATCHING
from rollmatch.config.schema import Rule, RunConfig
from rollmatch.config.servers import uses_servers
from rollmatch.config.strategy import KEY, read_strategy
from rollmatch.errors import ConfigError

OWN = ("fsdp", "fsdp_config", "deepspeed", "parallelism_config")
"""Fields of transformers that ``training.strategy`` sets, or whose place it takes."""


def _own_key(config: RunConfig) -> Iterator[ConfigError]:
    for name in OWN:
        if name in config.training.extra_arguments:
            problem, key = "is set by training.strategy", f"training.extra_arguments.{name}"
            remedy = "Set training.strategy to fsdp2, deepspeed_zero2, deepspeed_zero3 or a file."
            yield ConfigError(problem, code="argument-has-own-key", key=key, remedy=remedy)


def _readable(config: RunConfig) -> Iterator[ConfigError]:
    try:
        strategy = read_strategy(config.training.strategy)
    except ConfigError as error:
        yield error
        return
    if strategy.engine == "ddp":
        return
    if strategy.engine == "deepspeed" and effective.rollout_backend(config) == "hf":
        problem = f"is hf, but {config.training.strategy} generates with no policy of its own"
        key, remedy = f"{ROLLOUT_MATCHING}.rollout_backend", f"Set it to vllm, or {KEY} to fsdp2 or ddp."
        yield ConfigError(problem, code="strategy-needs-vllm", key=key, remedy=remedy)
    vllm = config.custom.extra.rollout_matching.vllm
    if strategy.splits_weights and vllm.carries_adapter and not uses_servers(config):
        problem = f"is {vllm.sync.mode}, but {config.training.strategy} gives each rank a part of the adapter"
        key, remedy = f"{ROLLOUT_MATCHING}.vllm.sync.mode", f"Set it to full, or {KEY} to ddp."
        yield ConfigError(problem, code="adapter-incomplete", key=key, remedy=remedy)
    if strategy.engine == "fsdp2" and config.training.extra_arguments.get("save_only_model"):
        problem = f"is set, but {config.training.strategy} saves parts, and the optimizer's state with them"
        key, remedy = "training.extra_arguments.save_only_model", f"Remove it, or set {KEY} to ddp."
        yield ConfigError(problem, code="strategy-saves-all", key=key, remedy=remedy)


_READ = ("rollout_backend", "vllm.mode", "vllm.sync.mode", "vllm.enable_lora")
STRATEGY_RULES: tuple[Rule, ...] = (
    Rule(reads=("training.extra_arguments",), check=_own_key),
    Rule(reads=(KEY, "training.extra_arguments", *(f"{ROLLOUT_MATCHING}.{name}" for name in _READ)), check=_readable),
)
