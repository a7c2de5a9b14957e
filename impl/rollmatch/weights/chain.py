"""A chain of ranks over gloo: each passes on to the next what it receives, slice by slice.

Every link carries a tensor once, however many ranks there are. Gloo's own broadcast is a tree: its source sends
ceil(log2(N + 1)) copies to N ranks, and a rank sends only when it has the whole tensor.
"""

from collections import deque
from datetime import timedelta
from typing import Protocol

from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo

CHAIN_PROTOCOL = 1
"""Number of this exchange, raised when it changes: ranks of different versions would wait until their time limit. The
native dialect's ``PROTOCOL`` is raised with it.
"""
BUCKET_BYTES = 4 * 2**20
"""Size of a slice. Smaller tensors are copied together up to it, while they fit into a cache."""


class Work(Protocol):
    """torch's handle of what is under way."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Errors: ``RuntimeError``."""


def neighbours(*, rank: int, source: int, world_size: int) -> tuple[int | None, int | None]:
    """Ranks to receive from and to pass on to; the chain begins at ``source``.

    >>> [neighbours(rank=rank, source=3, world_size=4) for rank in (3, 0, 1, 2)]
    [(None, 0), (3, 1), (0, 2), (1, None)]
    """
    place = (rank - source) % world_size
    before = (rank - 1) % world_size if place else None
    return before, (rank + 1) % world_size if place < world_size - 1 else None


class Passing:
    """One tensor on its way through this rank, in slices. Errors of all calls: ``RuntimeError``."""

    def __init__(
        self,
        group: ProcessGroupGloo,
        tensor: Tensor,
        *,
        between: tuple[int | None, int | None],
        tag: int,
        limit_s: float,
    ) -> None:
        """Begin to receive, or to send where nobody comes before. Slices have tags from ``tag`` on."""
        (before, self._after), self._limit = between, timedelta(seconds=limit_s)
        parts = tensor.view(-1).split(max(1, BUCKET_BYTES // tensor.element_size()))  # type: ignore[no-untyped-call]
        self.num_slices, self._slices = len(parts), deque(enumerate(parts, start=tag))
        self._came, self._sent = deque[Work](), deque[Work]()
        self._group: ProcessGroupGloo | None = group
        if before is None:
            self._pass_on(len(parts))
        for number, part in self._slices:
            self._came.append(group.recv([part], before, number))  # type: ignore[attr-defined]

    def arrive(self) -> None:
        """Until all slices are here; each is passed on at once."""
        while self._came:
            self._came.popleft().wait(self._limit)  # named nowhere: a traceback would keep the sockets open
            self._pass_on(1)

    def leave(self) -> None:
        """Until all slices have left, after ``arrive``."""
        while self._sent:
            self._sent.popleft().wait(self._limit)

    def drop(self) -> None:
        """Keep nothing of the group."""
        self._came.clear()
        self._sent.clear()
        self._group = None

    def _pass_on(self, num_slices: int) -> None:
        for _ in range(num_slices):
            number, part = self._slices.popleft()
            if self._group is None:
                raise RuntimeError("the group is closed")
            if self._after is not None:
                self._sent.append(self._group.send([part], self._after, number))  # type: ignore[attr-defined]
