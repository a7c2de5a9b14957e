"""A loss in the place of the output head, so that logits are never made whole.

With 152k ids the logits of a row outweigh the rest of its pass, so ``Scoring`` puts the loss in the head's place: the
head returns the loss, within the model's forward pass, so wrappers (DDP, adapters, autocast) see every weight used.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollmatch.learn.head import HeadStates, Logits

LARGE_VOCABULARY = 32_768
"""Ids from which on logits are worth avoiding on a CPU, too."""


_PROBES = (12345.678, 0.1)
"""Numbers that change where logits are capped, scaled, moved or rounded to half precision."""
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

    def __call__(self, model: nn.Module, inputs: dict[str, object], score: Score) -> tuple[Tensor, object]:
        """What ``score`` makes of the logits of one forward pass, with its graph, and the model's output."""
        if self.head is not None and not self._is_proven:
            if (proven := self._prove(self.head, model, inputs, score)) is not None:
                return proven
            self.head = None
        with losing_logits(self.head, score) if self.head is not None else nullcontext():
            outputs = model(**inputs)
        return outputs.logits if self.head is not None else score(outputs.logits.flatten(0, -2)), outputs

    def _prove(
        self, head: nn.Module, model: nn.Module, inputs: dict[str, object], score: Score
    ) -> tuple[Tensor, object] | None:
        """The first pass; None where the model makes something of what its head returns (caps it, scales it).

        A loss alone cannot tell, as one of 0 stays 0: ``_PROBES`` stand below it.
        """
        scored: list[Tensor] = []

        def probed(logits: Logits) -> Tensor:
            scored.append(score(logits))
            return torch.cat([scored[-1].flatten(), scored[-1].new_tensor(_PROBES)])[:, None]

        with losing_logits(head, probed) as made:
            outputs = model(**inputs)
        found, probes = outputs.logits, slice(-len(_PROBES), None)
        is_same = len(made) == 1 and found.shape == made[0].shape
        self._is_proven = is_same and torch.equal(found[probes].double(), made[0][probes].double())
        return (found[: probes.start, 0].reshape(scored[0].shape), outputs) if self._is_proven else None


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
        del head.forward
        if own is not None:
            head.forward = own
