"""The transports of the native dialect, as the learner chooses between them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollmatch.weights import gloo, nccl
from rollmatch.weights.digest import DIRECT, GLOO
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.group_store import GroupStore
from rollmatch.weights.plan import WeightTransfer


class WeightSource(Protocol):
    """An open group, as the learner uses it."""

    store: GroupStore

    def send(self, transfer: WeightTransfer, check: Callable[[], None]) -> tuple[str, ...]:
        """All tensors to all servers. Errors: ``TransferFailed``.

        Returns digests in hexadecimal: of all that was sent, then of the learner's own merge.
        """

    def close(self) -> None:
        """Leave the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """What differs between transports before anything travels."""

    name: str
    bucket_bytes: int
    tail_bytes: int
    """Of the last bucket, whose digests are made when everything has arrived; 0: it is like the others."""
    stages: bool
    """Whether servers keep weights beside what they serve until a commit."""
    open: Callable[[GroupAddress, torch.device], WeightSource]
    device_of: Callable[[Iterable[tuple[str, Tensor]]], torch.device]
    """Where the group of a learner with these weights is."""


TRANSPORTS = {
    GLOO: Transport(
        name=GLOO,
        bucket_bytes=gloo.BUCKET_BYTES,
        tail_bytes=0,
        stages=True,
        open=lambda address, _: gloo.GlooGroup.open(address),
        device_of=lambda _: torch.device("cpu"),
    ),
    DIRECT: Transport(
        name=DIRECT,
        bucket_bytes=nccl.BUCKET_BYTES,
        tail_bytes=nccl.TAIL_BYTES,
        stages=False,
        open=nccl.open_direct,
        device_of=nccl.device_of,
    ),
}
