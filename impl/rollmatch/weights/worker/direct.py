"""Opening a direct group, in a worker and in the learner (a door to vllm, whose NCCL binding both use)."""

import socket

import torch

from rollmatch.errors import SyncError
from rollmatch.weights.direct_group import DirectGroup, forbid_multicast
from rollmatch.weights.gloo_group import GlooGroup, GroupAddress


class NcclNotOpened(SyncError):
    """NCCL opens between the GPUs of all ranks, each of which is another."""

    code = "nccl-not-opened"
    status = 409


def open_direct(address: GroupAddress, device: torch.device, *, listener: socket.socket | None = None) -> DirectGroup:
    """Join; returns when all ranks have. Errors: ``CommunicatorTimeout``, ``NcclNotOpened``."""
    meeting = GlooGroup.open(address, listener=listener)
    if device.type != "cuda":
        return DirectGroup(meeting, device)
    forbid_multicast()
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    try:
        with torch.cuda.device(device):
            group = StatelessProcessGroup(rank=address.rank, world_size=address.world_size, store=meeting.store)
            nccl = PyNcclCommunicator(group, device=device)
    except RuntimeError as error:
        meeting.close()
        raise _not_opened(address, device, str(error)) from error
    if nccl.disabled:
        meeting.close()
        raise _not_opened(address, device, "vLLM finds no NCCL library")
    return DirectGroup(meeting, device, nccl)


def _not_opened(address: GroupAddress, device: torch.device, why: str) -> NcclNotOpened:
    return NcclNotOpened(
        f"rank {address.rank} of {address.world_size} on {device}: {why.splitlines()[0]}",
        key=f"group_port {address.port}",
        remedy="Give the learner and every worker a GPU of its own; NCCL_DEBUG=WARN tells more.",
    )
