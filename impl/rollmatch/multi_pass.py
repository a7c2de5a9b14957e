"""A batch of transformers' loop that takes several passes: as many as the tokens of its optimizer step need.

The loop counts batches, and steps after each ``gradient_accumulation_steps`` of them. So a step whose number of passes
follows from its rollouts is one batch to it, and ``training_step`` runs the passes.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import Trainer

from rollmatch.learn.batch import Passes


class MultiPassTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """A ``Trainer`` whose ``training_step`` takes one or more passes."""

    accelerator: Accelerator

    def training_step(self, model: nn.Module, inputs: Passes, num_items_in_batch: Tensor | None = None) -> Tensor:
        """As transformers'; the loss is the sum of all passes, and only the last one may exchange gradients."""
        passes, losses = inputs["passes"], []
        for left, batch in zip(reversed(range(len(passes))), passes, strict=True):
            with self._accumulating(model) if left else nullcontext():
                losses.append(super().training_step(model, {"passes": (batch,)}, num_items_in_batch))
        return torch.stack(losses).sum()

    def _accumulating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Without an exchange of gradients; as in transformers' loop, not where every pass needs one (FSDP2)."""
        if self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            return nullcontext()
        waiting: AbstractContextManager[None] = self.accelerator.no_sync(model)
        return waiting
