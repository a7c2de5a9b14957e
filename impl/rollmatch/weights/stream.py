"""Weights that are gathered and merged while they are sent: a rank holds what is under way, never the whole model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, overload, runtime_checkable

import torch
from torch import Tensor

from rollmatch.weights.plan import DTYPES, Plan, Spec, WeightTransfer, make_plan, spec_of


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
    """Weights that can be listed before they are made."""

    def specs(self) -> Sequence[Spec] | None:
        """In the order in which they come; None where none has to be made, or they cannot be listed."""

    def gather_in(self, types: Mapping[str, torch.dtype]) -> None:
        """Types in which the next iteration may make weights of these names; it is not an error if it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingWeights:
    """Weights that are to be sent, listed before the first one is made."""

    specs: tuple[Spec, ...]
    weights: Iterable[tuple[str, Tensor]]
    """(name, tensor), as ``specs`` lists them."""
    is_held: bool = False
    """Whether all are in memory already, so that they may be sent in any order."""
    gather_in: Callable[[Mapping[str, torch.dtype]], None] | None = None
    """Takes the types in which tensors travel, by name, before ranks gather the first one; None where they do not."""

    @property
    def is_gathered(self) -> bool:
        """Whether ranks gather them while they are sent, which is possible once."""
        return self.gather_in is not None

    @classmethod
    def of(cls, weights: "OutgoingWeights | Iterable[tuple[str, Tensor]]") -> "OutgoingWeights":
        """Weights that are not listed are all made now.

        >>> import torch
        >>> made = OutgoingWeights.of({"a": torch.zeros(2)}.items())
        >>> made.specs, made.is_held
        ((Spec(name='a', dtype='float32', shape=(2,)),), True)
        """
        if isinstance(weights, OutgoingWeights):
            return weights
        named = tuple(weights)
        return cls(specs=tuple(spec_of(*pair) for pair in named), weights=named, is_held=True)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights)

    def plan(self, specs: Sequence[Spec], *, bucket_bytes: int, tail_bytes: int = 0) -> Plan:
        """``make_plan`` of ``specs``, which are these with the types of the servers."""
        return make_plan(specs, bucket_bytes=bucket_bytes, tail_bytes=tail_bytes, in_order=not self.is_held)

    def transfer(self, plan: Plan) -> WeightTransfer:
        """One sync of these weights; tensors that are not in memory are made as they are sent."""
        passing = (tensor for _, tensor in self.weights)
        if self.gather_in is not None:
            self.gather_in({spec.name: DTYPES[spec.dtype] for spec in plan.specs})
        if not self.is_held:
            return WeightTransfer(plan=plan, tensors=TensorStream(passing, len(plan.specs)))
        held = tuple(passing)
        return WeightTransfer(plan=plan, tensors=tuple(held[index] for index in plan.order))


def outgoing(weights: OutgoingWeights | Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> WeightTransfer:
    """What is sent to servers that do not list their tensors; types stay."""
    named = OutgoingWeights.of(weights)
    return named.transfer(named.plan(named.specs, bucket_bytes=bucket_bytes))
