"""``training.strategy`` as arguments of transformers: accelerate and DeepSpeed distribute, we set their keys."""

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
    """Add what ``fsdp_config`` has no names for: precision, and FSDP2 on a CPU."""
    if strategy.engine != "fsdp2":
        return arguments
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if arguments.bf16:  # gradients are summed in float32; a loss made inside the model is not rounded
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        arguments.fsdp_plugin_args["mixed_precision_policy"] = policy
    if arguments.device.type == "cpu":  # accelerate 1.15 reads its FSDP settings only where it knows several devices
        PartialState().distributed_type = DistributedType.MULTI_GPU
    return arguments
