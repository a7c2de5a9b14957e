"""Which server generates which requests: contiguous chunks, work items of one call, work stealing. Needs no torch."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")


class Chunk(NamedTuple):
    """Consecutive requests that go to one server in one call."""

    server_index: int
    start: int
    """Index of the first request in the whole list."""
    stop: int
    """Index after the last one."""

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """The chunk's part of a list that is as long as the requests."""
        return items[self.start : self.stop]

    @property
    def num_requests(self) -> int:
        """At least 1."""
        return self.stop - self.start


def first_server(rank: int, learner_world_size: int, num_servers: int) -> int:
    """The server of a rank's first chunk: ranks begin at even distances, so that few requests a rank use all servers.

    >>> [first_server(rank, 4, 8) for rank in range(4)]
    [0, 2, 4, 6]
    """
    return rank * num_servers // learner_world_size


def cut_chunks(num_requests: int, num_servers: int, *, first: int) -> list[Chunk]:
    """N requests over S servers in chunks of ceil(N / S), in order; a server without requests has no chunk.

    ``first`` is the server of the first chunk; after the last server comes server 0.

    >>> [(chunk.server_index, chunk.start, chunk.stop) for chunk in cut_chunks(4, 3, first=0)]
    [(0, 0, 2), (1, 2, 4)]
    >>> [(chunk.server_index, chunk.start, chunk.stop) for chunk in cut_chunks(4, 3, first=2)]
    [(2, 0, 2), (0, 2, 4)]
    >>> cut_chunks(0, 3, first=0)
    []
    """
    size = -(-num_requests // num_servers)
    return [
        Chunk((first + place) % num_servers, start, min(start + size, num_requests))
        for place, start in enumerate(range(0, num_requests, size or 1))
    ]


class WorkItem(NamedTuple):
    """``requests[start:stop]`` of the window of optimizer step ``step``, for one server in one call."""

    step: int
    server_index: int
    start: int
    stop: int

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """The item's part of a list that is as long as the window's requests."""
        return items[self.start : self.stop]


def cut_work_items(step: int, num_requests: int, num_servers: int, *, pieces: int, first: int) -> list[WorkItem]:
    """The servers' chunks of a window, each cut in so many even ``pieces``, as far as it has requests.

    ``first``: as in ``cut_chunks``. Which server generates a rollout depends on the chunk alone, so that every mode
    requests the same sample from the same server.

    >>> [(item.server_index, item.start, item.stop) for item in cut_work_items(0, 6, 2, pieces=1, first=1)]
    [(1, 0, 3), (0, 3, 6)]
    >>> [(item.server_index, item.start, item.stop) for item in cut_work_items(0, 6, 2, pieces=2, first=0)]
    [(0, 0, 2), (0, 2, 3), (1, 3, 5), (1, 5, 6)]
    """
    work_items = []
    for chunk in cut_chunks(num_requests, num_servers, first=first):
        ends = {chunk.start - (-chunk.num_requests * place // pieces) for place in range(pieces + 1)}
        for start, stop in pairwise(sorted(ends)):
            work_items.append(WorkItem(step, chunk.server_index, start, stop))
    return work_items


def next_work_item(queues: Sequence[deque[WorkItem]], server_index: int, *, moves: bool) -> WorkItem | None:
    """The item that a server is to generate, which stays where it is; None where there is none for it.

    The earliest step comes first, since the learner waits for it; of that step the server's own items, from their
    beginning; else, where work ``moves``, the last work item of the server that has most requests of it waiting.

    >>> slow = deque([WorkItem(0, 0, 2, 4), WorkItem(0, 0, 4, 6), WorkItem(1, 0, 0, 6)])
    >>> idle = deque([WorkItem(1, 1, 6, 12)])
    >>> next_work_item([slow, idle], 1, moves=True), next_work_item([slow, idle], 1, moves=False)
    (WorkItem(step=0, server_index=0, start=4, stop=6), WorkItem(step=1, server_index=1, start=6, stop=12))
    """
    own = queues[server_index]
    if not moves:
        return own[0] if own else None
    waiting = [item for queue in queues for item in queue]
    if not waiting:
        return None
    step = min(item.step for item in waiting)
    if mine := [item for item in own if item.step == step]:
        return mine[0]
    return max(([item for item in queue if item.step == step] for queue in queues), key=_num_requests)[-1]


def _num_requests(work_items: Sequence[WorkItem]) -> int:
    return sum(item.stop - item.start for item in work_items)
