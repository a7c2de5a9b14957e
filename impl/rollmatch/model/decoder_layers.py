"""Decoder layers, the units in which a language model is compiled, recomputed and shared among ranks.

They are compiled one by one, in place: one graph serves all layers, parameter names stay.
``nn.Module.compile`` replaces what a layer runs, not the layer: state dicts, peft and hooks see the same modules.
A layer is one graph where a flash kernel attends to packed rows; else attention stays outside, one segment at a time.
Source: regional compilation as in torchtitan; transformers' ``GradientCheckpointingLayer`` wraps the compiled forward.
"""

import sys
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rollmatch.errors import LearnError
from rollmatch.model.adapters import actives_of, is_plain_lora
from rollmatch.model.policy import unwrap

GRAPH_LIMIT = 64
"""Graphs of one layer class before torch falls back to eager: {train, no_grad} x {adapters on, off} x batch of one or
more x kinds of layers. torch's default of 8 is too few."""


def decoder_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """The decoder layers of the language model, in order. Errors: ``layers-not-found``."""
    layers = getattr(model.get_decoder(), "layers", None)
    found = [layer for layer in layers or () if isinstance(layer, GradientCheckpointingLayer)]
    if not found:
        raise LearnError(
            f"{type(model).__name__} has no decoder layers that transformers can checkpoint",
            code="layers-not-found",
            key="training.compile_layers",
            remedy="Set training.compile_layers to false and training.gradient_checkpointing to true or false.",
        )
    return found


def compile_layers(model: PreTrainedModel, *, backend: str = "inductor") -> int:
    """Compile each decoder layer for sequences of any length; return the number of layers.

    Call it after adapters were added and weights frozen, before DDP. Compilation itself happens in the first forward
    and backward pass. Errors: ``layers-not-found``.
    """
    layers = decoder_layers(model)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPH_LIMIT)
    # Numbers of a layer (the norm's epsilon, an adapter's scale) never change. As inputs they are tensors on the CPU:
    # each graph gets a kernel in C++, and inductor tries for half a minute what this CPU's vectors can do.
    torch._dynamo.config.specialize_float = True
    for layer in layers:
        _add_in_products(layer)
        layer.compile(dynamic=True, backend=backend)
    return len(layers)


def _add_in_products(layer: nn.Module) -> None:
    """Let the second product of plain LoRA add to the base layer's output. As peft spells it, the adapter's output is
    written, kept for the backward pass and read again before it is added."""
    if "peft" not in sys.modules:
        return
    from peft.tuners.lora import Linear

    linears: list[Any] = [module for module in layer.modules() if type(module) is Linear]
    for linear in linears:
        linear.forward = MethodType(_added_forward, linear)


def _added_forward(linear: Any, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """[B, T, I] -> [B, T, O] of peft's linear layer; peft's own unless one plain adapter is to be added."""
    names = actives_of(linear)
    is_plain = not args and not kwargs and is_plain_lora(linear) and len(names) == 1
    if not is_plain or not _is_added(linear, names[0], x):
        output: Tensor = type(linear).forward(linear, x, *args, **kwargs)
        return output
    base: Tensor = linear.base_layer(x)
    low = linear.lora_A[names[0]](x) * linear.scaling[names[0]]
    weight = linear.lora_B[names[0]].weight
    return torch.addmm(base.flatten(0, -2), low.flatten(0, -2), weight.t()).view(base.shape)


def _is_added(linear: Any, name: str, x: Tensor) -> bool:
    """Whether one product can add an adapter: without dropout or DoRA, in the dtype of the base layer's output, and
    with a weight that is here (ZeRO-3 gathers it when its own module is called)."""
    weight, variant = linear.lora_B[name].weight, linear.lora_variant.get(name)
    alike = torch.is_autocast_enabled(x.device.type) or x.dtype == weight.dtype
    return alike and variant is None and isinstance(linear.lora_dropout[name], nn.Identity) and weight.numel() > 0


def sharded_units(model: nn.Module) -> str:
    """Names of the classes of decoder layers, each of which is gathered by itself. Errors: ``layers-not-found``.

    A vision tower is no unit of its own: a rank whose batch has no image would not take part in gathering it.
    """
    return ",".join(sorted({type(layer).__name__ for layer in decoder_layers(unwrap(model))}))
