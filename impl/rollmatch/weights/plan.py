"""What a sync transfers: which tensors, in which order, cut into which buckets; checked before the first byte.

A plan is made once and used as long as the learner's tensors and the servers stay the same. ``TransferPlan`` and
``MergePlan`` are the contract between a server and its workers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar

import msgspec
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
_Message = TypeVar("_Message")
_SAME_MODEL = "Serve the model that is trained."


class TensorMismatch(SyncError):
    """Learner and server hold the same tensors, with the same shapes and types.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """What a worker is to receive. Made by the server, read by ``worker.receiver``."""

    tensors: tuple[Spec, ...]
    buckets: tuple[int, ...]
    """Number of tensors of each broadcast."""
    sync_id: str | None = None
    """None: the group has no hand-shake (swift, trl, stock vLLM)."""
    digests: tuple[str, ...] | None = None
    """[len(tensors)] in hexadecimal, where the learner announced them."""
    digests_follow: bool = False
    """Whether the digests come in the group, after the last bucket."""
    may_repeat: bool = False
    """Whether a later sync may name this plan by its ``sync_id``."""
    merge: "MergePlan | None" = None
    """What an adapter is merged by as soon as it has arrived; then the digests of the learner's merge follow."""
    aliases: tuple[str, ...] = ()
    """Names of tied tensors, which have no memory of their own in the model."""
    in_place: bool = False
    """Whether tensors go straight into the model, not beside it until they are loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """How a worker merges an adapter that it has received."""

    merges: tuple[Merge, ...]
    merged_digests: Mapping[str, str] | None = None
    """Digests that the merged weights must have, by weight, where the learner announced them."""
    model: tuple[Spec, ...]
    """All tensors of the served model."""


def to_wire(message: object) -> bytes:
    """A plan or an address, as it passes through vLLM's rpc."""
    return msgspec.msgpack.encode(message)


def from_wire(raw: bytes, kind: type[_Message]) -> _Message:
    """The same on the other side, with every field's type checked. Errors: ``msgspec.ValidationError``.

    >>> from_wire(to_wire(TransferPlan(tensors=(Spec("a", "int8", (2,)),), buckets=(1,))), TransferPlan).tensors
    (Spec(name='a', dtype='int8', shape=(2,)),)
    """
    return msgspec.msgpack.decode(raw, type=kind)


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
