"""``training.strategy`` as arguments of transformers: accelerate and DeepSpeed distribute, we set their keys."""

import importlib

import torch
from transformers import TrainingArguments

from rollmatch.config.strategy import Strategy


def strategy_arguments(strategy: Strategy) -> dict[str, object]:
    """Fields of ``transformers.TrainingArguments``."""
    if strategy.engine == "fsdp2":
        each = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}  # else gradients stay whole on every rank
        return {"fsdp": True, "fsdp_config": dict(strategy.settings), "accelerator_config": each}
    return {"deepspeed": dict(strategy.settings)} if strategy.engine == "deepspeed" else {}


def complete(arguments: TrainingArguments, strategy: Strategy) -> TrainingArguments:
    """Add what ``fsdp_config`` has no names for, precision, and let accelerate split a policy on CPUs.

    A process is one rank, on the first GPU that it sees.
    """
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # transformers would hand each batch out to all of them
    if strategy.engine == "fsdp2" and arguments.bf16:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # gradients are summed in float32; a loss made inside the model is not rounded
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        arguments.fsdp_plugin_args["mixed_precision_policy"] = policy
    if strategy.engine != "ddp" and arguments.device.type == "cpu":
        _split_on_cpus(strategy)
    return arguments


def _split_on_cpus(strategy: Strategy) -> None:
    """Register a kind of device with accelerate 1.15 for which it splits: on CPUs it leaves every strategy out."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if strategy.engine == "deepspeed":
        importlib.import_module("deepspeed").init_distributed(dist_backend="gloo")
    kind = DistributedType.DEEPSPEED if strategy.engine == "deepspeed" else DistributedType.MULTI_GPU
    PartialState().distributed_type = kind
