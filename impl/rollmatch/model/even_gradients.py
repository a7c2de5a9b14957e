"""Gradients of the same weights on every learner rank, also of a vision tower that some ranks' passes have not used.

A pass without images gives a tower none. FSDP2 would sum up tensors of different sizes. DDP finds out which weights a
pass has used, but only while it computes the gradient of one of them, and FSDP2 gathers layers for their backward pass:
where the language model is frozen, such a pass has neither, and the other ranks wait for ever. In a step in which no
rank has an image, a tower gets none at all, as with one rank.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EvenGradients:
    """Gradients of zeros for weights that a training pass of ``model`` has not used, through all of its layers.

    Under FSDP2 (``is_split``) of all weights that it gathers with the whole model, under DDP of the first that learns.
    """

    def __init__(self, model: "PreTrainedModel", *, is_split: bool) -> None:
        parts: list[nn.Module] = [*model.modules()]
        inner = [part for part in parts if isinstance(part, FSDPModule) and part is not model]
        apart = {id(weight) for part in inner for weight in part.parameters()}
        held = [
            (part, name)
            for part in parts
            for name, weight in part.named_parameters(recurse=False)
            if weight.requires_grad and id(weight) not in apart
        ]
        self.is_needed = False
        """Whether some rank's passes of this step have images."""
        self._held = held if is_split else held[:1]
        self._zero: Tensor | None = None
        model.register_forward_pre_hook(self._begin)
        model.get_input_embeddings().register_forward_hook(self._join)

    def _begin(self, *_: object) -> None:
        """Before all else of a forward pass, but after FSDP2 has gathered the weights."""
        weights = [part._parameters[name] for part, name in self._held]
        is_wanted = self.is_needed and weights and torch.is_grad_enabled()
        self._zero = _ZerosWhereUnused.apply(*weights) if is_wanted else None  # type: ignore[no-untyped-call]

    def _join(self, embedding: nn.Module, args: object, hidden: Tensor) -> Tensor:
        if self._zero is None:
            return hidden
        joined: Tensor = _Joined.apply(hidden, self._zero)  # type: ignore[no-untyped-call]
        self._zero = None
        return joined


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


class _Joined(torch.autograd.Function):
    """([...] numbers, a scalar 0) -> the same numbers, with a graph that reaches what the scalar was made of."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, zero: Tensor) -> Tensor:
        ctx.zero = zero
        return numbers.view_as(numbers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.zeros_like(ctx.zero)
