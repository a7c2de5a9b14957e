"""A policy that learner ranks hold in parts: FSDP2's ``DTensor`` and DeepSpeed's ZeRO-3, gathered one by one.

Every forward pass gathers weights, so that all ranks run the same number of passes.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rollmatch.errors import LaunchError


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of the weights.

    >>> is_sharded(nn.Linear(2, 2))
    False
    """
    if not torch.distributed.is_initialized():
        return False
    return any(
        isinstance(module, FSDPModule) or any(hasattr(weight, "ds_id") for weight in module._parameters.values())
        for module in model.modules()
    )


@torch.no_grad()
def whole(weight: Tensor) -> Tensor:
    """All of a weight, detached: a copy where ranks hold parts of it, which all of them then call for; else itself."""
    if isinstance(weight, DTensor):
        gathered_weight: Tensor = weight.full_tensor().detach()
        return gathered_weight
    if not hasattr(weight, "ds_id"):
        return weight.detach()
    with _deepspeed().zero.GatheredParameters([weight], modifier_rank=None):
        return weight.detach().clone()


def meta_of(weight: Tensor) -> Tensor:
    """A tensor without memory, of the type and the shape of the whole weight.

    >>> meta_of(torch.ones(2, 3, dtype=torch.bfloat16))
    tensor(..., device='meta', size=(2, 3), dtype=torch.bfloat16)
    """
    return torch.empty(shape_of(weight), dtype=weight.dtype, device="meta")


def shape_of(weight: Tensor) -> tuple[int, ...]:
    """Of the whole weight.

    >>> shape_of(torch.ones(2, 3))
    (2, 3)
    """
    return tuple(getattr(weight, "ds_shape", weight.shape))


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Whole weights in a module while this lasts; all ranks call it. One that is not split stays as it is."""
    spread = [weight for weight in module.parameters() if hasattr(weight, "ds_id")]
    parts: list[dict[str, Any]] = [part._parameters for part in module.modules()]
    split = [(part, name, weight) for part in parts for name, weight in part.items() if isinstance(weight, DTensor)]
    for held, name, weight in split:
        held[name] = nn.Parameter(whole(weight), requires_grad=False)
    try:
        with _deepspeed().zero.GatheredParameters(spread, modifier_rank=None) if spread else nullcontext():
            yield
    finally:
        for held, name, weight in split:
            held[name] = weight


@contextmanager
def changeable(module: nn.Module) -> Iterator[None]:
    """Whole weights in a module while this lasts, where ZeRO-3 has split them; what rank 0 makes of them stays."""
    spread = [weight for weight in module.parameters() if hasattr(weight, "ds_id")]
    with _deepspeed().zero.GatheredParameters(spread, modifier_rank=0) if spread else nullcontext():
        yield


def gather_in_passes(model: nn.Module) -> nn.Module:
    """A model that does not learn; where ZeRO-3 has split it as it was read, each forward pass gathers its weights.

    transformers calls ``deepspeed.initialize`` for the policy alone.
    """
    if any(hasattr(weight, "ds_id") for weight in model.parameters()):
        is_bfloat16 = next(model.parameters()).dtype == torch.bfloat16
        settings = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": is_bfloat16}}
        _deepspeed().initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, **settings})
    return model


def check_split(model: nn.Module, strategy: str) -> None:
    """Errors: ``strategy-not-engaged``, where no rank holds less than all weights."""
    if not any(isinstance(weight, DTensor) for weight in model.parameters()):
        raise not_engaged(strategy)


def not_engaged(strategy: str) -> LaunchError:
    """The error for a strategy that the libraries left out without a word."""
    problem = f"accelerate did not engage {strategy}"
    remedy = "Start two learner ranks or more (--gpus 0,1, or torchrun); else set it to ddp."
    return LaunchError(problem, code="strategy-not-engaged", key="training.strategy", remedy=remedy)


class EvenGradients:
    """Gradients of the same weights on every rank, of those that FSDP2 gathers with the whole model.

    A vision tower gets none from a batch without images, and ranks would sum up tensors of different sizes. Weights
    that a pass has not used get a gradient of zeros.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = [part for part in model.modules() if isinstance(part, FSDPModule) and part is not model]
        apart = {id(weight) for part in inner for weight in part.parameters()}
        self._held = [
            (part, name)
            for part in model.modules()
            for name, weight in part.named_parameters(recurse=False)
            if weight.requires_grad and id(weight) not in apart
        ]
        self._zero: Tensor | None = None
        model.register_forward_pre_hook(self._begin)

    def _begin(self, *_: object) -> None:
        """Before all else of a forward pass, but after FSDP2 has gathered the weights."""
        weights = [part._parameters[name] for part, name in self._held]
        self._zero = _ZerosWhereUnused.apply(*weights) if weights else None  # type: ignore[no-untyped-call]

    def join(self, loss: Tensor) -> Tensor:
        """The same loss, with a graph that reaches all weights of the last forward pass."""
        zero, self._zero = self._zero, None
        return loss if zero is None else loss + zero.to(loss.dtype)


class _ZerosWhereUnused(torch.autograd.Function):
    """[...] weights -> a scalar 0. Its backward pass comes last, as autograd takes the newest node that is ready."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.weights = weights
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, zero: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for weights that have none by now."""
        return tuple(torch.zeros_like(weight) if weight.grad is None else None for weight in ctx.weights)


@torch.no_grad()
def run_idle(model: nn.Module) -> None:
    """A forward pass of one token, for the passes of other ranks."""
    device = next(model.parameters()).device
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)


def _deepspeed() -> Any:
    return sys.modules["deepspeed"]
