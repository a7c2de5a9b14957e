"""Decoder layers, the units in which a language model is compiled, recomputed and shared among ranks.

They are compiled one by one, in place: one graph serves all layers, parameter names stay.
``nn.Module.compile`` replaces what a layer runs, not the layer: state dicts, peft and hooks see the same modules.
Attention stays outside the graphs, since packed rows pass their bounds as Python integers.
Source: regional compilation as in torchtitan; transformers' ``GradientCheckpointingLayer`` wraps the compiled forward.
"""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rollmatch.errors import LearnError
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
        layer.compile(dynamic=True, backend=backend)
    return len(layers)


def sharded_units(model: nn.Module) -> str:
    """Names of the classes of decoder layers, each of which is gathered by itself. Errors: ``layers-not-found``.

    A vision tower is no unit of its own: a rank whose batch has no image would not take part in gathering it.
    """
    return ",".join(sorted({type(layer).__name__ for layer in decoder_layers(unwrap(model))}))
