"""Weights that are gathered while they are sent: a rank holds what is under way, and never the whole model."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, overload, runtime_checkable

from torch import Tensor

from rollmatch.weights.plan import Spec, WeightTransfer, make_plan, spec_of


class TensorStream(Sequence[Tensor]):
    """Tensors by index, each made when it is requested: once, in order, and not kept.

    >>> import torch
    >>> stream = TensorStream(iter([torch.zeros(1), torch.ones(1), torch.ones(2)]), 3)
    >>> len(stream), stream[0].tolist(), [len(each) for each in stream[1:3]]
    (3, [0.0], [1, 2])
    """

    def __init__(self, tensors: Iterator[Tensor], size: int) -> None:
        self._tensors, self._size, self._next = tensors, size, 0

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self._size))]
        if index >= self._size:
            raise IndexError(index)
        assert index == self._next, f"tensor {index} is requested, {self._next} is next"
        self._next += 1
        return next(self._tensors)


@runtime_checkable
class ListedWeights(Protocol):
    """Weights that can be listed before they are gathered."""

    def specs(self) -> Sequence[Spec] | None:
        """In the order in which they come; None where they cannot."""


class WeightStream:
    """Iterates once over (name, tensor), as ``specs`` lists them."""

    def __init__(self, specs: Sequence[Spec], pairs: Iterator[tuple[str, Tensor]]) -> None:
        self.specs = tuple(specs)
        self._pairs = pairs

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._pairs

    def tensors(self) -> TensorStream:
        """The tensors alone, in the order of ``specs``."""
        return TensorStream((tensor for _, tensor in self._pairs), len(self.specs))


def outgoing(weights: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> WeightTransfer:
    """What is sent to servers that do not list their tensors; types stay, and a stream keeps its order."""
    if isinstance(weights, WeightStream):
        plan = make_plan(weights.specs, bucket_bytes=bucket_bytes, in_order=True)
        return WeightTransfer(plan=plan, tensors=weights.tensors())
    named = list(weights)
    plan = make_plan([spec_of(*pair) for pair in named], bucket_bytes=bucket_bytes)
    return WeightTransfer(plan=plan, tensors=tuple(named[index][1] for index in plan.order))
