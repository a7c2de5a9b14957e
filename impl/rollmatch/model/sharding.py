"""A policy that learner ranks share in parts, as a whole: every forward pass gathers weights, so that all ranks run the
same number of passes.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rollmatch.errors import LaunchError
from rollmatch.model.compiled_layers import decoder_layers
from rollmatch.model.policy import unwrap


def sharded_units(model: nn.Module) -> str:
    """Names of the classes of decoder layers, each of which is gathered by itself. Errors: ``layers-not-found``.

    A vision tower is no unit of its own: a rank whose batch has no image would not take part in gathering it.
    """
    return ",".join(sorted({type(layer).__name__ for layer in decoder_layers(unwrap(model))}))


def check_split(model: nn.Module, strategy: str) -> None:
    """Errors: ``strategy-not-engaged``, where no rank holds less than all weights."""
    if not any(isinstance(weight, DTensor) for weight in model.parameters()):
        raise not_engaged(strategy)


def not_engaged(strategy: str) -> LaunchError:
    """The error for a strategy that the libraries left out without a word."""
    problem = f"accelerate did not engage {strategy}"
    remedy = "Start two learner ranks or more (--gpus 0,1, or torchrun); else set it to ddp."
    return LaunchError(problem, code="strategy-not-engaged", key="training.strategy", remedy=remedy)


@torch.no_grad()
def run_idle(model: nn.Module) -> None:
    """A forward pass of one token, for the passes of other ranks."""
    device = next(model.parameters()).device
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
