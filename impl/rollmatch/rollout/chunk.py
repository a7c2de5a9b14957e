"""Which server gets which requests: stable contiguous chunks. Needs no torch."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")


class Chunk(NamedTuple):
    """Consecutive requests that go to one server in one call."""

    server_index: int
    start: int
    """Index of the first request in the whole list."""
    stop: int
    """Index after the last one."""

    def halves(self) -> tuple["Chunk", "Chunk"]:
        """Two chunks for the same server, the first as long as the second or one longer.

        >>> Chunk(1, 4, 7).halves()
        (Chunk(server_index=1, start=4, stop=6), Chunk(server_index=1, start=6, stop=7))
        """
        middle = (self.start + self.stop + 1) // 2
        return self._replace(stop=middle), self._replace(start=middle)

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """The chunk's part of a list that is as long as the requests."""
        return items[self.start : self.stop]

    @property
    def num_requests(self) -> int:
        """At least 1."""
        return self.stop - self.start


def cut_chunks(num_requests: int, num_servers: int) -> list[Chunk]:
    """N requests over S servers in chunks of ceil(N / S), in order; a server without requests has no chunk.

    >>> [(chunk.server_index, chunk.start, chunk.stop) for chunk in cut_chunks(4, 3)]
    [(0, 0, 2), (1, 2, 4)]
    >>> cut_chunks(0, 3)
    []
    """
    size = -(-num_requests // num_servers)
    return [
        Chunk(server, start, min(start + size, num_requests))
        for server, start in enumerate(range(0, num_requests, size or 1))
    ]
