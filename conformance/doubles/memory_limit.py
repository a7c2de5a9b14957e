"""A limit of memory that the kernel keeps: who is under it and needs more is killed, as in a container that is full.

Linux with the memory controller of cgroup v1, as root.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

CONTROLLER = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 1 << 20
"""Of new memory: what a process holds already stays with the group that it leaves."""
NEEDS = "Linux, root and a writable memory controller of cgroup v1 (/sys/fs/cgroup/memory)"


def can_limit_memory() -> bool:
    """Whether a group with a limit can be made here."""
    try:
        with limited_memory():
            return True
    except OSError:
        return False


class MemoryLimit:
    """A group of processes that may take ``LIMIT_BYTES`` more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, process: psutil.Process) -> None:
        """From its next page on the process is under the limit."""
        (self.folder / "cgroup.procs").write_text(str(process.pid))

    def num_killed(self) -> int:
        """Processes that the kernel has killed at the limit."""
        lines = (self.folder / "memory.oom_control").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def close(self) -> None:
        """Give what still runs its memory back, and remove the group."""
        for pid in (self.folder / "cgroup.procs").read_text().split():
            (CONTROLLER / "cgroup.procs").write_text(pid)
        self.folder.rmdir()


@contextmanager
def limited_memory() -> Iterator[MemoryLimit]:
    """A group without processes. Errors: ``OSError`` where none can be made."""
    folder = CONTROLLER / f"rollmatch-{uuid.uuid4().hex}"
    folder.mkdir()
    limit = MemoryLimit(folder)
    try:
        (folder / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        yield limit
    finally:
        limit.close()
