"""What a sync transfers: which tensors, in which order, cut into which buckets; checked before the first byte.

A plan is made once and used as long as the learner's tensors and the servers stay the same. Weights are listed first
(``OutgoingWeights``) and may be gathered and merged while they are sent: a rank holds what is under way, never the
whole model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, overload

import torch
from torch import Tensor

from rollmatch.errors import SyncError

FLOATS = ("float32", "bfloat16", "float16")
"""Types between which weights are cast to what the server holds."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
"""Types that weights may have, by the names that torch writes after ``torch.``"""
_SAME_MODEL = "Serve the model that is trained."


class TensorMismatch(SyncError):
    """Learner and server do not hold the same tensors with the same shapes and types.

    ``code``: ``tensor-unknown``, ``tensor-missing``, ``tensor-shape-mismatch`` or ``tensor-dtype-mismatch``.
    """

    code = "tensor-mismatch"
    status = 400


class Spec(NamedTuple):
    """One tensor, without its numbers."""

    name: str
    dtype: str
    """A key of ``DTYPES``."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """In C order, without padding."""
        return DTYPES[self.dtype].itemsize * prod(self.shape)

    @property
    def kind(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape, as torch has them."""
        return DTYPES[self.dtype], self.shape


class Bucket(NamedTuple):
    """Consecutive tensors of one dtype that travel in one broadcast."""

    start: int
    stop: int
    """Indices into the plan's tensors."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Tensors in the order in which they travel."""

    specs: tuple[Spec, ...]
    """With the types that the server holds."""
    order: tuple[int, ...]
    """[len(specs)] index of each in the learner's list."""
    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(bucket.num_bytes for bucket in self.buckets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """One weight made from its base and the adapter tensors of these names."""

    name: str
    lora_a: str
    lora_b: str
    magnitude: str | None = None
    """Set for DoRA."""
    scaling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransfer:
    """One sync of the learner: tensors in the order of the plan."""

    plan: Plan
    tensors: Sequence[Tensor]
    """[len(plan.specs)], each requested once, bucket by bucket."""
    merges: tuple[Merge, ...] = ()
    """What servers merge, where the tensors are an adapter's."""
    merged: Iterable[Tensor] = ()
    """[len(merges)] the learner's own merge, each weight made when its turn comes."""

    @property
    def is_streamed(self) -> bool:
        """Whether tensors are made as they are sent."""
        return not isinstance(self.tensors, tuple)

    @property
    def is_adapter(self) -> bool:
        """Whether servers merge what arrives."""
        return bool(self.merges)


def make_plan(specs: Sequence[Spec], *, bucket_bytes: int, tail_bytes: int = 0, in_order: bool = False) -> Plan:
    """Tensors grouped by dtype (in order of first appearance), cut wherever a bucket would pass ``bucket_bytes``.

    A tensor larger than that has a bucket of its own. With ``tail_bytes`` the largest of a dtype come first, and what
    is left of so many bytes makes the last bucket: work on it is all that remains when everything has arrived.
    ``in_order``: as the learner lists them, because they are made in that order.

    >>> plan = make_plan([Spec("a", "float32", (2,)), Spec("b", "bfloat16", (3,)), Spec("c", "float32", (1,))],
    ...                  bucket_bytes=100)
    >>> [spec.name for spec in plan.specs], plan.order, [tuple(bucket) for bucket in plan.buckets]
    (['a', 'c', 'b'], (0, 2, 1), [(0, 2, 12), (2, 3, 6)])
    >>> plan = make_plan([Spec(name, "int8", (size,)) for name, size in (("a", 2), ("b", 5), ("c", 9), ("d", 1))],
    ...                  bucket_bytes=100, tail_bytes=4)
    >>> [spec.name for spec in plan.specs], [tuple(bucket) for bucket in plan.buckets]
    (['c', 'b', 'a', 'd'], [(0, 2, 14), (2, 4, 3)])
    """
    dtypes = list(dict.fromkeys(spec.dtype for spec in specs))
    sizes = [spec.num_bytes if tail_bytes else 0 for spec in specs]
    order = sorted(range(len(specs)), key=lambda index: (dtypes.index(specs[index].dtype), -sizes[index]))
    if in_order:
        order, tail_bytes = list(range(len(specs))), 0
    ordered = tuple(specs[index] for index in order)
    buckets = tuple(_with_tail(list(_cut(ordered, bucket_bytes)), ordered, tail_bytes))
    return Plan(specs=ordered, order=tuple(order), buckets=buckets)


def _cut(specs: Sequence[Spec], bucket_bytes: int) -> Iterable[Bucket]:
    start, size = 0, 0
    for index, spec in enumerate(specs):
        full = size + spec.num_bytes > bucket_bytes or spec.dtype != specs[start].dtype
        if index > start and full:
            yield Bucket(start, index, size)
            start, size = index, 0
        size += spec.num_bytes
    if specs:
        yield Bucket(start, len(specs), size)


def _with_tail(buckets: Sequence[Bucket], specs: Sequence[Spec], tail_bytes: int) -> Sequence[Bucket]:
    """Split the last bucket, where it has both tensors that fit into ``tail_bytes`` together and others."""
    if not buckets or not tail_bytes:
        return buckets
    *others, last = buckets
    index, size = last.stop, 0
    while index > last.start and size + specs[index - 1].num_bytes <= tail_bytes:
        index -= 1
        size += specs[index].num_bytes
    if index in (last.start, last.stop):
        return buckets
    return [*others, Bucket(last.start, index, last.num_bytes - size), Bucket(index, last.stop, size)]


def fit(specs: Sequence[Spec], held: Mapping[str, Spec], aliases: Mapping[str, str], *, server: str) -> list[Spec]:
    """The same tensors with the types that a server holds, once all of them fit and none is missing.

    ``aliases`` are further names of tensors in ``held`` (a tied head); they may be sent, and need not be.
    Errors: ``TensorMismatch``.
    """
    fitted = [_fit_one(spec, held.get(aliases.get(spec.name, spec.name)), server) for spec in specs]
    missing = [name for name in held if name not in {spec.name for spec in specs}]
    if missing:
        problem = f"{server} holds {len(missing)} tensors that the learner lacks, first {missing[0]}"
        raise TensorMismatch(problem, key=missing[0], remedy=_SAME_MODEL, code="tensor-missing")
    return fitted


def _fit_one(spec: Spec, held: Spec | None, server: str) -> Spec:
    if held is None:
        problem = f"{server} has no tensor {spec.name}"
        raise TensorMismatch(problem, key=spec.name, remedy=_SAME_MODEL, code="tensor-unknown")
    if held.shape != spec.shape:
        problem = f"{spec.name} has shape {list(spec.shape)} here and {list(held.shape)} on {server}"
        raise TensorMismatch(problem, key=spec.name, remedy=_SAME_MODEL, code="tensor-shape-mismatch")
    if held.dtype != spec.dtype and not {held.dtype, spec.dtype} <= set(FLOATS):
        problem, remedy = f"{spec.name} is {spec.dtype} here and {held.dtype} on {server}", "Serve it in that type."
        raise TensorMismatch(problem, key=spec.name, remedy=remedy, code="tensor-dtype-mismatch")
    return spec._replace(dtype=held.dtype)


def spec_of(name: str, tensor: Tensor) -> Spec:
    """A tensor's name, type and shape."""
    return Spec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


class TensorStream(Sequence[Tensor]):
    """Tensors by index, each made when it is requested: once, in order, and not kept.

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
