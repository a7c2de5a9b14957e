"""The groups a worker can be in: ours on gloo, and the one that swift and trl trainers expect (a door to vllm)."""

import socket
from datetime import timedelta
from typing import Any, Protocol

import torch

from rollmatch.errors import SyncError
from rollmatch.weights.flight import Landing
from rollmatch.weights.gloo_group import (
    GlooGroup,
    GroupAddress,
    TransferFailed,
    broadcast_on,
    not_joined,
    open_stateless,
    open_store,
)


class TransportUnknown(SyncError):
    """A group is made of a transport that this server has."""

    code = "transport-unknown"
    status = 400


class Group(Protocol):
    """What the receiver needs; the learner is the source of every broadcast."""

    rank: int

    def set_ready(self, sync_id: str) -> None:
        """Say that this rank waits for the bytes of a sync."""

    def wait_word(self, sync_id: str) -> str:
        """Wait for the learner's word on it."""

    def begin(self, memory: torch.Tensor) -> Landing:
        """Receive the next broadcast into ``memory``; what comes back waits for it."""

    def close(self) -> None:
        """Leave."""


def parse_address(told: dict[str, Any]) -> GroupAddress:
    """An address as it came over vLLM's rpc."""
    return GroupAddress(**told)


def open_group(address: GroupAddress, *, transport: str, listener: socket.socket | None, device: torch.device) -> Group:
    """Join. Errors: ``CommunicatorTimeout``, ``TransportUnknown``."""
    if transport == "gloo":
        return GlooMember(GlooGroup.open(address, listener=listener))
    if transport == "stateless":
        return StatelessMember(address, listener, device)
    raise TransportUnknown(f"there is no transport {transport}", key="transport", remedy="Use gloo.")


class GlooMember:
    """Our own group; the learner is the last rank unless told otherwise."""

    def __init__(self, group: GlooGroup, *, source: int | None = None) -> None:
        self.group = group
        self.source = group.address.world_size - 1 if source is None else source
        self.rank = group.address.rank

    def set_ready(self, sync_id: str) -> None:
        """As the protocol."""
        self.group.set_ready(sync_id)

    def wait_word(self, sync_id: str) -> str:
        """As the protocol."""
        return self.group.wait_word(sync_id)

    def begin(self, memory: torch.Tensor) -> Landing:
        """As the protocol. Errors: ``TransferFailed``, also of the landing."""
        return self.group.begin(memory, source=self.source)

    def close(self) -> None:
        """As the protocol."""
        self.group.close()


class StatelessMember:
    """vLLM's ``StatelessProcessGroup`` with PyNccl on it (on a CPU: gloo), and its store barrier after each broadcast.

    This is what ms-swift's and TRL's clients open. Sources: ms-swift 4.6 ``rlhf_trainers/vllm_client.py``, TRL 1.10
    ``extras/vllm_client.py``.
    """

    def __init__(self, address: GroupAddress, listener: socket.socket | None, device: torch.device) -> None:
        from vllm.distributed.utils import StatelessProcessGroup

        self.address, self.rank, self.device = address, address.rank, device
        try:
            store = open_store(address, listener)
            self._group = StatelessProcessGroup(rank=address.rank, world_size=address.world_size, store=store)
            self._communicator = self._open_nccl() if device.type == "cuda" else open_stateless(address, store)
        except RuntimeError as error:
            raise not_joined(address, error) from error
        store.set_timeout(timedelta(seconds=address.timeout_s))

    def _open_nccl(self) -> Any:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        return PyNcclCommunicator(self._group, device=self.device)

    def set_ready(self, sync_id: str) -> None:
        """These trainers have no hand-shake."""

    def wait_word(self, sync_id: str) -> str:
        """These trainers have no hand-shake."""
        return ""

    def begin(self, memory: torch.Tensor) -> Landing:
        """As the protocol, barrier included, to the end: the trainer waits for it. Errors: ``TransferFailed``."""
        buffer = memory if self.device.type == "cpu" else torch.empty_like(memory, device=self.device)
        source = self.address.world_size - 1
        try:
            if self.device.type == "cuda":
                self._communicator.broadcast(buffer, src=source)
            else:
                broadcast_on(self._communicator, buffer, source=source, timeout_s=self.address.timeout_s)
            self._group.barrier()
        except (RuntimeError, ValueError) as error:
            problem = f"rank {self.rank}: {str(error).splitlines()[0]}"
            raise TransferFailed(problem, key="broadcast", remedy="Open a new communicator and sync again.") from error
        memory.copy_(buffer)
        return lambda: None

    def close(self) -> None:
        """As the protocol."""
        self._communicator = self._group = None
