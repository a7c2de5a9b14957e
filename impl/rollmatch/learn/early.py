"""Gradients of micro-batches that are learnt from before the step's divisors are known.

The loss of a step is a sum of parts, each divided by a total over the whole step: text by its weight, coordinate slots
by their number. Before the last rollout is there, those totals are unknown, and no single factor applied later makes
up for a guess at two of them. So the graph of an early micro-batch is kept, and goes through backward once, as any
other, as soon as the totals are known. Where it cannot be kept, or nothing else is to be done, its parts go through
backward one by one, undivided, into gradients of their own, to be divided and added up then: twice the work, earlier.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class EarlyGradients:
    """Kept graphs, and undivided gradients of every part of the loss: one more set of them per part after the first.

    >>> weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    >>> early = EarlyGradients([weight])
    >>> for text, slots in ((weight[0] * 4, weight[1] * 6), (weight[0] * 2, weight[1])):
    ...     early.keep([text, slots])
    >>> early.spend_oldest(), early.num_kept
    (True, 1)
    >>> early.settle([3, 7], scale=1.0)
    [4.0, 3.0]
    >>> weight.grad.round()
    tensor([2., 1.])
    >>> early.keep([weight[0], weight[1]])
    >>> early.settle([1, 1], scale=2.0)
    [2.0, 3.0]
    >>> weight.grad.round()
    tensor([4., 3.])
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.values: list[float] = []
        """Undivided value of each part, for the log."""
        self._sums: list[list[Tensor | None]] = []
        self._kept: deque[Sequence[Tensor]] = deque()

    @property
    def num_kept(self) -> int:
        """Micro-batches whose graphs are in memory."""
        return len(self._kept)

    def keep(self, parts: Sequence[Tensor]) -> None:
        """One micro-batch's undivided parts, which share a graph."""
        self._kept.append(parts)

    def spend_oldest(self) -> bool:
        """Backward of the undivided parts that wait longest, one after the other; False where none wait."""
        if not self._kept:
            return False
        parts = self._take_oldest()
        self._sums = self._sums or [[None] * len(self.parameters) for _ in parts]
        for place, part in enumerate(parts):
            if not part.requires_grad:  # nothing of this kind is supervised
                continue
            is_last = place == len(parts) - 1
            grads = torch.autograd.grad(part, self.parameters, retain_graph=not is_last, allow_unused=True)
            for index, grad in enumerate(grads):
                self._sums[place][index] = _plus(self._sums[place][index], grad)
        return True

    def settle(self, divisors: Sequence[float], *, scale: float) -> list[float]:
        """Add everything, each part over its divisor and times ``scale``, to ``.grad``, and forget it.

        Returns the value of each part over its divisor.
        """
        while self._kept:
            self._settle_oldest(divisors, scale=scale)
        for sums, divisor in zip(self._sums, divisors):
            for parameter, total in zip(self.parameters, sums):
                if total is not None:
                    share = total.mul_(scale / divisor)
                    parameter.grad = _plus(parameter.grad, share)
        values = [value / divisor for value, divisor in zip(self.values, divisors)]
        self._sums, self.values = [], []
        return values

    def _settle_oldest(self, divisors: Sequence[float], *, scale: float) -> None:
        parts = self._take_oldest()
        shares = [part * (scale / divisor) for part, divisor in zip(parts, divisors) if part.requires_grad]
        if not shares:
            return
        grads = torch.autograd.grad(torch.stack(shares).sum(), self.parameters, allow_unused=True)
        for parameter, grad in zip(self.parameters, grads):
            parameter.grad = _plus(parameter.grad, grad)

    def _take_oldest(self) -> Sequence[Tensor]:
        """Out of what is kept, its values counted."""
        parts = self._kept.popleft()
        before = self.values or [0.0] * len(parts)
        self.values = [value + float(part.detach()) for value, part in zip(before, parts)]
        return parts


def _plus(held: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """In place; None is nothing."""
    return held if grad is None else grad if held is None else held.add_(grad)
