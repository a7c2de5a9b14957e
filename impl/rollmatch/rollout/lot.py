"""What one call asks of one server: consecutive requests of one window. Needs no torch."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

from rollmatch.rollout.chunk import cut_chunks

Item = TypeVar("Item")


class Lot(NamedTuple):
    """``requests[start:stop]`` of the window of optimizer step ``step``, for one server in one call."""

    step: int
    server_index: int
    start: int
    stop: int

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """The lot's part of a list that is as long as the window's requests."""
        return items[self.start : self.stop]


def cut_lots(step: int, parts: Sequence[int], num_servers: int, *, pieces: int = 1) -> list[Lot]:
    """The servers' chunks of a window, cut again where a part of it ends; ``parts`` are sizes, in order.

    Each chunk is also cut in so many even ``pieces``, as far as it has requests.

    Which server writes a rollout depends on the chunk alone, so that every mode asks the same server for the same
    sample; smaller parts only come back earlier. Six requests in parts of 2 over 2 servers:

    >>> [(lot.server_index, lot.start, lot.stop) for lot in cut_lots(0, (2, 2, 2), 2)]
    [(0, 0, 2), (0, 2, 3), (1, 3, 4), (1, 4, 6)]
    >>> [(lot.server_index, lot.start, lot.stop) for lot in cut_lots(0, (6,), 2)]
    [(0, 0, 3), (1, 3, 6)]
    >>> [(lot.server_index, lot.start, lot.stop) for lot in cut_lots(0, (6,), 2, pieces=2)]
    [(0, 0, 2), (0, 2, 3), (1, 3, 5), (1, 5, 6)]
    """
    ends = list(accumulate(parts, initial=0))
    lots = []
    for chunk in cut_chunks(ends[-1], num_servers):
        evenly = [chunk.start - (-chunk.num_requests * place // pieces) for place in range(pieces + 1)]
        inside = [end for end in ends if chunk.start < end < chunk.stop]
        for start, stop in pairwise(sorted({*evenly, *inside})):
            lots.append(Lot(step, chunk.server_index, start, stop))
    return lots
