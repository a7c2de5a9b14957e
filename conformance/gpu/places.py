"""A GPU for each of two processes, or one GPU that both share.

NCCL refuses two ranks on one GPU of one host. With a host id each, it takes them for two hosts and joins them over
sockets: the whole protocol runs, without the speed. Source: NCCL 2.28 ``init.cc`` (duplicate GPUs), ``NCCL_HOSTID``.
"""

import torch

OVER_SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": "0"}


def place(number: int) -> dict[str, str]:
    """Environment variables of process 0 or 1."""
    if torch.cuda.device_count() > 1:
        return {"CUDA_VISIBLE_DEVICES": str(number)}
    return {"CUDA_VISIBLE_DEVICES": "0", "NCCL_HOSTID": f"host-{number}"} | OVER_SOCKETS
