"""A GPU for each of two processes, or one GPU that both share.

NCCL refuses two ranks on one GPU of one host. With a host id each, it takes them for two hosts and joins them over
sockets: the whole protocol runs, without the speed. Source: NCCL 2.28 ``init.cc`` (duplicate GPUs), ``NCCL_HOSTID``.
"""

import os
from pathlib import Path

import torch

OVER_SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": "0"}


def gpu_of(number: int) -> str:
    """Of process 0 or 1. A shared GPU has its driver's name for process 1: the learner refuses a server's own."""
    if torch.cuda.device_count() > 1 or number == 0:
        return str(number)
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def place(number: int) -> dict[str, str]:
    """Environment variables of process 0 or 1."""
    visible = {"CUDA_VISIBLE_DEVICES": gpu_of(number)}
    if torch.cuda.device_count() > 1:
        return visible
    return visible | {"NCCL_HOSTID": f"host-{number}"} | OVER_SOCKETS


def put_at(number: int, folder: Path, monkeypatch) -> None:
    """Commands that a test starts from here on are process 0 or 1.

    TRL's server refuses a learner that names the GPU of its own, so that on a shared one the learner names another.
    """
    variables = place(number)
    if "NCCL_HOSTID" in variables:
        at_start = "import rollmatch.dialects.trl.sender as sender\nsender.uuid_of = lambda device: 'another'\n"
        (folder / "sitecustomize.py").write_text(at_start)
        variables["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
