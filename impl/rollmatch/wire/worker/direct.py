"""Opening a direct group, in a worker and in the learner (a door to vllm, whose NCCL binding both use)."""

import socket

import torch

from rollmatch.wire.direct_group import DirectGroup, forbid_multicast
from rollmatch.wire.gloo_group import GlooGroup, GroupAddress, not_joined


def open_direct(address: GroupAddress, device: torch.device, *, listener: socket.socket | None = None) -> DirectGroup:
    """Join; returns when all ranks have. Errors: ``CommunicatorTimeout``."""
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
        raise not_joined(address, error) from error
    if nccl.disabled:
        meeting.close()
        raise not_joined(address, RuntimeError("vLLM finds no NCCL library"))
    return DirectGroup(meeting, device, nccl)
