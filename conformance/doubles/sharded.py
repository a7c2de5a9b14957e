"""A small policy with adapters, split over ranks by FSDP2."""

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard

from conformance.doubles.adapters import perturb_adapters
from conformance.doubles.tiny_qwen3_vl import make_tiny_qwen3


def make_model():
    """Eight layers with adapters on every linear layer, which learn."""
    torch.manual_seed(0)
    model = get_peft_model(make_tiny_qwen3(num_layers=8), LoraConfig(r=2, target_modules="all-linear"))
    return perturb_adapters(model)


def split(model):
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    return fully_shard(model)
