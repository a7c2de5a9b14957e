"""What a server orders its workers to receive and merge, as bytes through vLLM's rpc: the contract of these two."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from rollmatch.weights.plan import Merge, Spec

_Message = TypeVar("_Message")


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
    swapped: tuple[str, ...] = ()
    """Names of tensors that arrive with their last two dimensions swapped."""
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

    >>> from_wire(to_wire(TransferPlan(tensors=(Spec("a", "int8", (2,)),), buckets=(1,))), TransferPlan)
    ... # doctest: +NORMALIZE_WHITESPACE
    TransferPlan(tensors=(Spec(name='a', dtype='int8', shape=(2,)),), buckets=(1,), sync_id=None, digests=None,
        digests_follow=False, may_repeat=False, merge=None, aliases=(), swapped=(), in_place=False)
    """
    return msgspec.msgpack.decode(raw, type=kind)
