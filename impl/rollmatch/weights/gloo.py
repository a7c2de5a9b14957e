"""The gloo transport: weights through the memory of the CPU, on a process group outside torch's default one.

One group spans the workers of all servers and the learner's rank 0, which is the last rank and the source of every
broadcast; towards a stock vLLM the learner is rank 0. A broadcast is a chain: each rank passes on to the next what it
receives, slice by slice, so that every link carries every weight once, however many servers there are (gloo's own
broadcast is a tree, whose source sends ceil(log2(N + 1)) copies to N servers). Several broadcasts are in flight at the
same time, so that the link is not idle between two of them.
"""

import socket
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from rollmatch.errors import first_line
from rollmatch.weights.digest import Buffer, digests_of, pieces_of
from rollmatch.weights.group_address import GroupAddress, TransferFailed, is_wildcard, not_joined, own_address
from rollmatch.weights.group_store import GroupStore
from rollmatch.weights.plan import WeightTransfer

CHAIN_PROTOCOL = 1
"""Number of this exchange, raised when it changes: ranks of different versions would wait until their time limit. The
native dialect's ``PROTOCOL`` is raised with it.
"""
BUCKET_BYTES = 4 * 2**20
"""Size of a slice. Smaller tensors are copied together up to it, while they fit into a cache."""
MAX_IN_FLIGHT = 6
"""Broadcasts at the same time; all ranks begin them in the same order."""
_NUM_THREADS = 4
"""For those who broadcast by gloo's tree: each in flight keeps one busy; torch's own two would let the others wait."""
Completion = Callable[[], None]
"""Waits until a broadcast has ended."""


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


class GlooGroup:
    """An open group. Errors of all calls: ``TransferFailed``; after one, the group is of no more use."""

    def __init__(self, store: GroupStore, group: ProcessGroupGloo, *, source: int | None = None) -> None:
        """``source``: the rank that sends; by default the last one."""
        self.address, self.store = store.address, store
        self.rank = self.address.rank
        self.source = self.address.world_size - 1 if source is None else source
        self._group: ProcessGroupGloo | None = group
        self._in_flight: list[list[Passing]] = []
        """Each alone in a list: whoever keeps an error must not keep, by its traceback, the group's sockets open."""
        self._leaving: list[Passing] = []
        """The one that has arrived last: its slices may still be on their way to the next rank."""
        self._tag = 0
        self._buffers = [Buffer() for _ in range(MAX_IN_FLIGHT + 1)]

    @classmethod
    def open(
        cls, address: GroupAddress, *, listener: socket.socket | None = None, source: int | None = None
    ) -> "GlooGroup":
        """Join; returns when all ranks have. Rank 0 may bring its listener.

        Errors: ``GroupPortInUse``, ``CommunicatorTimeout``, ``GroupAddressInvalid``.
        """
        store = GroupStore(address, listener=listener)
        try:
            group = open_gloo(store, address)
        except (RuntimeError, TypeError) as error:  # torch's, or the store's own
            store.close()
            raise not_joined(address, getattr(error, "problem", error)) from error
        store.limit(address.timeout_s)
        return cls(store, group, source=source)

    def send(self, transfer: WeightTransfer, check: Completion = lambda: None) -> tuple[str, ...]:
        """Broadcast every bucket, then the digests, which are returned in hexadecimal.

        Behind them come those of the learner's own merge, which are not sent and are made while servers merge.
        ``check`` is not needed: a server that gives up leaves the group, which the broadcast notices.
        """
        digests: list[bytes] = []
        kept = 1 if transfer.is_streamed else MAX_IN_FLIGHT  # beside it, the next bucket is made
        broadcast_all(pieces_of(transfer, self._buffers, digests), self.begin, kept=kept)
        return (*(digest.hex() for digest in digests), *digests_of(transfer.merged))

    def broadcast(self, tensor: Tensor, *, source: int | None = None) -> None:
        """Send the tensor from ``source`` to every other rank, in place."""
        self.begin(tensor, source=source)()

    def begin(self, tensor: Tensor, *, source: int | None = None) -> Completion:
        """The same, in flight when this returns; all ranks begin their broadcasts in one order."""
        if self._group is None:
            raise self._closed()
        root = self.source if source is None else source
        try:
            held = [self._passing(self._group, tensor, root)]
        except RuntimeError as error:
            raise self._failed(error) from error
        self._in_flight.append(held)
        if self._group is None:  # closed meanwhile
            self._drop(held)

        def complete() -> None:
            self._in_flight.remove(held)
            if not held:
                raise self._closed()
            earlier = self._leaving
            try:
                held[0].arrive()
                if self.rank == root:  # whose memory is used again
                    held[0].leave()
                else:
                    self._leaving = held
                for passing in earlier:
                    passing.leave()
            except RuntimeError as error:
                self._drop(held, earlier)
                raise self._failed(error) from error

        return complete

    def close(self) -> None:
        """Leave; sockets of transfers in flight close with the last reference."""
        self._drop(*self._in_flight, self._leaving)
        self._group = None
        self.store.close()

    def _passing(self, group: ProcessGroupGloo, tensor: Tensor, source: int) -> Passing:
        between = neighbours(rank=self.rank, source=source, world_size=self.address.world_size)
        passing = Passing(group, tensor, between=between, tag=self._tag, limit_s=self.address.timeout_s)
        self._tag += passing.num_slices
        return passing

    def _drop(self, *lists: list[Passing]) -> None:
        for held in lists:
            while held:
                held.pop().drop()

    def _failed(self, error: RuntimeError) -> TransferFailed:
        problem = f"rank {self.rank} of {self.address.world_size}: {first_line(error)}"
        remedy = "Look for the rank that died; then open a new communicator and sync again."
        return TransferFailed(problem, key="broadcast", remedy=remedy)

    def _closed(self) -> TransferFailed:
        return TransferFailed("the group is closed", remedy="Open a communicator.")


class Blocks:
    """Blocks of memory by size, used again by every sync: the first use of memory costs as much as writing it."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] a block of any content. Blocks of other sizes go when none fits."""
        found = self._free.get(num_bytes)
        if found:
            return found.pop()
        if found is None:  # another plan than before: its blocks would stay for ever
            self._free = {}
        return torch.empty(num_bytes, dtype=torch.uint8)

    def give_back(self, blocks: list[Tensor]) -> None:
        """Blocks that nobody reads or writes any more."""
        for block in blocks:
            self._free.setdefault(len(block), []).append(block)


class InFlight:
    """Broadcasts in the order in which they were begun."""

    def __init__(self, begin: Callable[[Tensor], Completion]) -> None:
        self._begin = begin
        self._under_way: deque[tuple[Completion, Completion]] = deque()

    def add(self, tensor: Tensor, *, then: Completion = lambda: None) -> None:
        """Begin one as soon as fewer than ``MAX_IN_FLIGHT`` are under way.

        ``then`` is called when it has ended and the next one has begun: the link does not wait for it.
        """
        ended = self._complete_first() if len(self._under_way) == MAX_IN_FLIGHT else None
        self._under_way.append((self._begin(tensor), then))
        if ended is not None:
            ended()

    def wait(self, *, kept: int = 0) -> None:
        """Until all but the last ``kept`` have ended."""
        while len(self._under_way) > kept:
            self._complete_first()()

    def _complete_first(self) -> Completion:
        """Return what is to be called now; where one fails the others are let go, which its traceback would keep."""
        complete, then = self._under_way.popleft()
        try:
            complete()
        except BaseException:
            self._under_way.clear()
            raise
        return then


def broadcast_all(
    tensors: Iterable[Tensor], begin: Callable[[Tensor], Completion], *, kept: int = MAX_IN_FLIGHT
) -> None:
    """Broadcast one after the other, and wait for all.

    ``tensors`` may be made as they are needed: each while the last ``kept`` before it are under way.
    """
    in_flight = InFlight(begin)
    for tensor in tensors:
        in_flight.add(tensor)
        in_flight.wait(kept=kept)
    in_flight.wait()


def open_gloo(store: Store, address: GroupAddress) -> ProcessGroupGloo:
    """Join; listen at the interface that leads to the group's host, and nowhere else. Errors: ``RuntimeError``."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    if not is_wildcard(address.host):
        options._devices = [ProcessGroupGloo.create_device(hostname=own_address(address.host, address.port))]
    options._timeout = timedelta(seconds=address.join_timeout_s)
    options._threads = _NUM_THREADS
    return ProcessGroupGloo(store, address.rank, address.world_size, options)
