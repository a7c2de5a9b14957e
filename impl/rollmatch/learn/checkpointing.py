"""Gradient checkpointing of as few decoder layers as memory allows, chosen for each micro-batch.

The first micro-batches of a run measure what a token costs; from then on each forward pass keeps the activations of as
many layers as fit below a share of the memory (the GPU's, or the machine's without one)::

    peak(T, k) = allocated + T * (per_token + k * per_token_and_layer)        T tokens, k layers kept

``allocated`` is read before each pass, so weights, optimizer state, gradients and an engine in the same process count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rollmatch.learn.memory import DeviceMemory, learner_memory

FIRST_KEPT = 2
"""Layers kept in the second micro-batch, which measures what a kept layer costs."""
GROWTH = 4
"""At most so many times as many layers as in the pass before: a first estimate of few layers is rough."""


@dataclass(slots=True)
class TokenCosts:
    """Bytes of activations per token: of a pass with all layers checkpointed, and more for each layer kept."""

    per_token: float
    per_token_and_layer: float

    def layers_that_fit(self, num_tokens: int, room: int) -> int:
        """Layers whose activations fit into ``room`` bytes beside the rest of the pass.

        >>> TokenCosts(per_token=100.0, per_token_and_layer=10.0).layers_that_fit(50, room=10_000)
        10
        >>> TokenCosts(per_token=100.0, per_token_and_layer=10.0).layers_that_fit(200, room=10_000)
        0
        """
        return max(0, int((room / num_tokens - self.per_token) / self.per_token_and_layer))


class AdaptiveCheckpointing:
    """Switches the checkpointing of decoder layers before each training forward pass of ``model``.

    ``share``: of the device's memory that may be in use. ``num_kept``: layers that keep their activations in the
    current pass. transformers' ``gradient_checkpointing_enable`` is called before the first pass.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[GradientCheckpointingLayer],
        *,
        share: float,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.layers = layers
        self.share, self.memory = share, memory or learner_memory()
        self.num_kept = 0
        self.costs: TokenCosts | None = None
        self._num_passes = 0
        self._base: float | None = None
        self._stored_base = 0.0
        self._handles = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
        ]

    def close(self) -> None:
        """Remove the hooks; the layers stay as they are."""
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        self._finish_first_pass()
        self._num_tokens = _count_tokens(kwargs)
        self._keep(self._choose())
        self._before = self.memory.allocated()
        if self._num_passes == 0:
            self.memory.reset_peak()
        self._num_passes += 1

    def _after_forward(self, model: nn.Module, args: tuple[object, ...], output: object) -> None:
        """Learn from what the pass has stored for its backward pass."""
        if not (model.training and torch.is_grad_enabled()):
            return
        stored = (self.memory.allocated() - self._before) / self._num_tokens
        if self.num_kept == 0 and self.costs is None:
            self._stored_base = stored
        elif self.num_kept and self._base is not None:
            per_layer = max(1.0, (stored - self._stored_base) / self.num_kept)
            self.costs = TokenCosts(per_token=self._base, per_token_and_layer=per_layer)

    def _finish_first_pass(self) -> None:
        """The first pass is over, its backward pass too: read its peak."""
        if self._num_passes == 1:
            self._base = max(self._stored_base, (self.memory.peak() - self._before) / self._num_tokens)

    def _choose(self) -> int:
        if self._base is None:
            return 0
        if self.costs is None:
            return min(FIRST_KEPT, len(self.layers))
        fitting = self.costs.layers_that_fit(self._num_tokens, self.memory.room(self.share))
        return min(fitting, len(self.layers), max(FIRST_KEPT, GROWTH * self.num_kept))

    def _keep(self, num_kept: int) -> None:
        """Keep the activations of the last layers: their backward pass comes first and frees them first."""
        self.num_kept = num_kept
        first_kept = len(self.layers) - num_kept
        for index, layer in enumerate(self.layers):
            layer.gradient_checkpointing = index < first_kept


def _count_tokens(kwargs: dict[str, object]) -> int:
    """Tokens of a batch, padding included."""
    ids = kwargs.get("input_ids")
    return ids.numel() if isinstance(ids, Tensor) else 1
