"""Where a trainer gets the loss of a micro-batch: from the model's logits, or inside its output head.

With 152k ids the logits of a row are larger than the rest of its pass, so the loss takes the head's place: the model
hands its last hidden states to the head as ever, and what comes out is the loss. All of it happens within the model's
forward pass, so wrappers (DDP, adapters, autocast) see every weight used there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollmatch.learn.head import HeadStates, Logits

LARGE_VOCABULARY = 32_768
"""Ids from which on logits are worth avoiding on a CPU, too."""

Score = Callable[[Logits], Tensor]
"""Logits [N, V], or what stands for them, -> losses of any shape."""


def head_worth_avoiding(model: PreTrainedModel) -> nn.Module | None:
    """The output head, where its logits are too large to be made; None where they may as well be."""
    head: nn.Module | None = model.get_output_embeddings()
    if head is None:
        return None
    weight = next(head.parameters())
    return head if weight.is_cuda or len(weight) >= LARGE_VOCABULARY else None


class Scoring:
    """Forward passes that end in a loss. ``head``: where to score; None: on logits."""

    def __init__(self, head: nn.Module | None) -> None:
        self.head = head
        self._is_proven = False

    def __call__(self, model: nn.Module, inputs: dict[str, Any], score: Score) -> tuple[Tensor, Any]:
        """What ``score`` makes of the logits of one forward pass, with its graph, and the model's output."""
        if self.head is not None:
            with losing_logits(self.head, score) as made:
                outputs = model(**inputs)
            if self._ends_in(made, outputs.logits):
                return outputs.logits, outputs
            self.head = None
        outputs = model(**inputs)
        return score(outputs.logits.flatten(0, -2)), outputs

    def _ends_in(self, made: list[Tensor], logits: Tensor) -> bool:
        """Whether the model returns what its head returned, and not something made of it (capped, scaled).

        Looked at once: comparing waits for the device.
        """
        if not self._is_proven:
            self._is_proven = len(made) == 1 and torch.equal(made[0].detach(), logits.detach())
        return self._is_proven


@contextmanager
def losing_logits(head: nn.Module, score: Score) -> Iterator[list[Tensor]]:
    """While this lasts, the head returns what ``score`` makes of its input; yields all it returned."""
    plain, own = head.forward, head.__dict__.get("forward")
    made: list[Tensor] = []

    def scored(hidden: Tensor) -> Tensor:
        made.append(score(HeadStates.of(hidden.flatten(0, -2), head, forward=plain)))
        return made[-1]

    head.forward = scored
    try:
        yield made
    finally:
        if own is None:
            del head.forward
        else:
            head.forward = own
