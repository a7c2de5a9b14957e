"""Memory of the device that the learner computes on: a GPU's, or the machine's where it has none."""

import ctypes
import os
import resource
from pathlib import Path
from typing import Protocol

import psutil
import torch

KIB = 1024
PROCESS = Path("/proc/self")
CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Limit and use of a container's memory below /sys/fs/cgroup, in versions 2 and 1."""


class DeviceMemory(Protocol):
    """Memory of the device that the learner computes on. Unit: bytes."""

    def allocated(self) -> int:
        """Bytes in tensors of this process."""

    def peak(self) -> int:
        """Highest ``allocated`` since ``reset_peak``."""

    def reset_peak(self) -> None:
        """Begin a new peak."""

    def room(self, share: float) -> int:
        """Bytes that tensors may still take until ``share`` of the device is in use; negative above it."""


def learner_memory() -> DeviceMemory:
    """The current CUDA device's, or the machine's."""
    return CudaMemory() if torch.cuda.is_available() else HostMemory()


class CudaMemory:
    """The current CUDA device."""

    def allocated(self) -> int:
        """Bytes in tensors of this process."""
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Highest ``allocated`` since ``reset_peak``."""
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        """Begin a new peak."""
        torch.cuda.reset_peak_memory_stats()

    def room(self, share: float) -> int:
        """Free memory and cached blocks, less what is to stay free."""
        free, total = torch.cuda.mem_get_info()
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return free + cached - int((1 - share) * total)


class HostMemory:
    """The machine's memory, or its container's. The ranks of a machine share what is free."""

    def __init__(self) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's: freed blocks count until they are returned
        self._return_freed = trim or (lambda _: None)
        self._num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def allocated(self) -> int:
        """Bytes of this process in memory."""
        self._return_freed(0)
        return int(psutil.Process().memory_info().rss)

    def peak(self) -> int:
        """Highest since ``reset_peak``; since the process began where the kernel does not reset it."""
        try:
            status = (PROCESS / "status").read_text()
            return KIB * int(status.partition("VmHWM:")[2].split()[0])
        except (OSError, IndexError):
            return KIB * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def reset_peak(self) -> None:
        """Begin a new peak, where the kernel allows it."""
        try:
            (PROCESS / "clear_refs").write_text("5")
        except OSError:
            return

    def room(self, share: float) -> int:
        """This rank's part of what is available, less what is to stay free."""
        self._return_freed(0)
        machine = psutil.virtual_memory()
        total, available = int(machine.total), int(machine.available)
        for limit, used in container_limits():
            total, available = min(total, limit), min(available, limit - used)
        return (available - int((1 - share) * total)) // self._num_ranks


def container_limits(root: Path = Path("/sys/fs/cgroup")) -> list[tuple[int, int]]:
    """Limit and use of this container's memory, file caches included; empty without a limit. Unit: bytes."""
    found = []
    for names in CGROUPS:
        try:
            limit, used = ((root / name).read_text().strip() for name in names)
        except OSError:
            continue
        if limit != "max":
            found.append((int(limit), int(used)))
    return found
