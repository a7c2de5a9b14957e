"""What a sync carries: which tensors, in which order, cut into which buckets; checked before the first byte.

A plan is made once and used as long as the learner's tensors and the servers stay the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollmatch.errors import SyncError

FLOATS = ("float32", "bfloat16", "float16")
"""Types between which weights are cast to what the server holds."""
ITEM_SIZES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}


class TensorUnknown(SyncError):
    """The server holds every tensor that is sent."""

    code = "tensor-unknown"


class TensorMissing(SyncError):
    """Every tensor of the server is sent."""

    code = "tensor-missing"


class TensorShapeMismatch(SyncError):
    """A tensor has one shape on both sides."""

    code = "tensor-shape-mismatch"


class TensorDtypeMismatch(SyncError):
    """A tensor has one type on both sides, or one that may be cast."""

    code = "tensor-dtype-mismatch"


class Spec(NamedTuple):
    """One tensor, without its numbers."""

    name: str
    dtype: str
    """As torch writes it, without ``torch.``"""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """In C order, without padding."""
        size = ITEM_SIZES.get(self.dtype, 1)
        for length in self.shape:
            size *= length
        return size


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
    """[len(specs)] place of each in the learner's list."""
    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(bucket.num_bytes for bucket in self.buckets)


def make_plan(specs: Sequence[Spec], *, bucket_bytes: int, tail_bytes: int = 0) -> Plan:
    """Tensors grouped by dtype (in order of first appearance), cut wherever a bucket would pass ``bucket_bytes``.

    A tensor larger than that has a bucket of its own. With ``tail_bytes`` the largest of a dtype come first, and what
    is left of so many bytes makes the last bucket: work on it is all that is done when everything has been carried.

    >>> plan = make_plan([Spec("a", "float32", (2,)), Spec("b", "bfloat16", (3,)), Spec("c", "float32", (1,))],
    ...                  bucket_bytes=100)
    >>> [spec.name for spec in plan.specs], plan.order, [tuple(bucket) for bucket in plan.buckets]
    (['a', 'c', 'b'], (0, 2, 1), [(0, 2, 12), (2, 3, 6)])
    >>> plan = make_plan([Spec(name, "int8", (size,)) for name, size in (("a", 2), ("b", 5), ("c", 9), ("d", 1))],
    ...                  bucket_bytes=100, tail_bytes=4)
    >>> [spec.name for spec in plan.specs], [tuple(bucket) for bucket in plan.buckets]
    (['c', 'b', 'a', 'd'], [(0, 2, 14), (2, 4, 3)])
    """
    kinds = list(dict.fromkeys(spec.dtype for spec in specs))
    sizes = [spec.num_bytes if tail_bytes else 0 for spec in specs]
    order = sorted(range(len(specs)), key=lambda place: (kinds.index(specs[place].dtype), -sizes[place]))
    ordered = tuple(specs[place] for place in order)
    buckets = tuple(_with_tail(list(_cut(ordered, bucket_bytes)), ordered, tail_bytes))
    return Plan(specs=ordered, order=tuple(order), buckets=buckets)


def _cut(specs: Sequence[Spec], bucket_bytes: int) -> Iterable[Bucket]:
    start, size = 0, 0
    for place, spec in enumerate(specs):
        full = size + spec.num_bytes > bucket_bytes or spec.dtype != specs[start].dtype
        if place > start and full:
            yield Bucket(start, place, size)
            start, size = place, 0
        size += spec.num_bytes
    if specs:
        yield Bucket(start, len(specs), size)


def _with_tail(buckets: Sequence[Bucket], specs: Sequence[Spec], tail_bytes: int) -> Sequence[Bucket]:
    """The last one in two, where it has both tensors that fit into ``tail_bytes`` together and others."""
    if not buckets or not tail_bytes:
        return buckets
    *others, last = buckets
    place, size = last.stop, 0
    while place > last.start and size + specs[place - 1].num_bytes <= tail_bytes:
        place -= 1
        size += specs[place].num_bytes
    if place in (last.start, last.stop):
        return buckets
    return [*others, Bucket(last.start, place, last.num_bytes - size), Bucket(place, last.stop, size)]


def fit(specs: Sequence[Spec], held: Mapping[str, Spec], aliases: Mapping[str, str], *, server: str) -> list[Spec]:
    """The same tensors with the types that a server holds, once all of them fit and none is missing.

    ``aliases`` are further names of tensors in ``held`` (a tied head); they may be sent, and need not be.
    Errors: ``TensorUnknown``, ``TensorMissing``, ``TensorShapeMismatch``, ``TensorDtypeMismatch``.
    """
    fitted = [_fit_one(spec, held.get(aliases.get(spec.name, spec.name)), server) for spec in specs]
    missing = [name for name in held if name not in {spec.name for spec in specs}]
    if missing:
        raise TensorMissing(
            f"{server} holds {len(missing)} tensors that the learner lacks, first {missing[0]}",
            key=missing[0],
            remedy="Serve the model that is trained.",
        )
    return fitted


def _fit_one(spec: Spec, held: Spec | None, server: str) -> Spec:
    if held is None:
        problem, remedy = f"{server} has no tensor {spec.name}", "Serve the model that is trained."
        raise TensorUnknown(problem, key=spec.name, remedy=remedy)
    if held.shape != spec.shape:
        problem = f"{spec.name} has shape {list(spec.shape)} here and {list(held.shape)} on {server}"
        raise TensorShapeMismatch(problem, key=spec.name, remedy="Serve the model that is trained.")
    if held.dtype != spec.dtype and not {held.dtype, spec.dtype} <= set(FLOATS):
        problem = f"{spec.name} is {spec.dtype} here and {held.dtype} on {server}"
        raise TensorDtypeMismatch(problem, key=spec.name, remedy="Serve the model in the precision of training.")
    return spec._replace(dtype=held.dtype)


def spec_of(name: str, tensor: Any) -> Spec:
    """A tensor's name, type and shape."""
    return Spec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
