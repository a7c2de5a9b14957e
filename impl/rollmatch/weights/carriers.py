"""What differs between the transports of the native dialect: how tensors are packed, proven and carried."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rollmatch.weights.bucket import BUCKET_BYTES, Buffer
from rollmatch.weights.comparison import digests_of
from rollmatch.weights.digest_kinds import DIRECT, GLOO
from rollmatch.weights.direct_sender import BUCKET_BYTES as DIRECT_BUCKET_BYTES
from rollmatch.weights.direct_sender import TAIL_BYTES, DirectShipment, device_of, mixed_digests_of
from rollmatch.weights.flight import MAX_IN_FLIGHT
from rollmatch.weights.plan import Plan
from rollmatch.weights.shipment import Shipment

Check = Callable[[], None]
"""Raises when a server has given up."""


class Carrier(Protocol):
    """A transport, as the sender needs it."""

    name: str
    bucket_bytes: int
    tail_bytes: int
    """Of the last bucket, whose digests are made when all has been carried; 0: it is as the others."""
    stages: bool
    """Whether servers keep weights beside what they serve until they are told to commit."""

    def device(self, weights: Iterable[tuple[str, Any]]) -> torch.device:
        """Where the group is."""

    def prove(self, tensors: Sequence[Tensor]) -> list[str]:
        """[n] digests in hexadecimal, as servers of this transport make them."""

    def pack(self, plan: Plan, tensors: Sequence[Tensor], adapter: Mapping[str, Any] | None) -> Any:
        """A shipment: it has ``plan``, ``adapter`` and, once it was carried, ``digests``."""

    def carry(self, shipment: Any, group: Any, check: Check) -> None:
        """All of it, to all servers. Errors: ``TransferFailed``, those of ``check``."""


class GlooCarrier:
    """Through the memory of the CPU; servers stage."""

    name, stages, bucket_bytes, tail_bytes = GLOO, True, BUCKET_BYTES, 0

    def __init__(self) -> None:
        self._buffers = [Buffer() for _ in range(MAX_IN_FLIGHT + 1)]

    def device(self, weights: Iterable[tuple[str, Any]]) -> torch.device:
        """As the protocol."""
        return torch.device("cpu")

    def prove(self, tensors: Sequence[Tensor]) -> list[str]:
        """As the protocol."""
        return digests_of(tensors)

    def pack(self, plan: Plan, tensors: Sequence[Tensor], adapter: Mapping[str, Any] | None) -> Shipment:
        """As the protocol."""
        return Shipment(plan, tensors, adapter=adapter)

    def carry(self, shipment: Shipment, group: Any, check: Check) -> None:
        """As the protocol; a server that gives up leaves the group, which the broadcast notices by itself."""
        shipment.carry(group, self._buffers)


class DirectCarrier:
    """Straight into what the servers serve."""

    name, stages, bucket_bytes, tail_bytes = DIRECT, False, DIRECT_BUCKET_BYTES, TAIL_BYTES

    def device(self, weights: Iterable[tuple[str, Any]]) -> torch.device:
        """As the protocol."""
        return device_of(weights)

    def prove(self, tensors: Sequence[Tensor]) -> list[str]:
        """As the protocol."""
        return mixed_digests_of(tensors)

    def pack(self, plan: Plan, tensors: Sequence[Tensor], adapter: Mapping[str, Any] | None) -> DirectShipment:
        """As the protocol."""
        return DirectShipment(plan, tensors, adapter=adapter)

    def carry(self, shipment: DirectShipment, group: Any, check: Check) -> None:
        """As the protocol."""
        shipment.carry(group, check)


CARRIERS: Mapping[str, Callable[[], Carrier]] = {GLOO: GlooCarrier, DIRECT: DirectCarrier}
