"""Several broadcasts under way at the same time, so that the link does not rest between two of them."""

from collections import deque
from collections.abc import Callable, Iterable

from torch import Tensor

MAX_IN_FLIGHT = 6
"""Broadcasts at the same time; both ends begin them in the same order."""
Landing = Callable[[], None]
"""Waits until a broadcast has ended."""


class Flight:
    """Broadcasts in the order in which they were begun."""

    def __init__(self, begin: Callable[[Tensor], Landing]) -> None:
        self._begin = begin
        self._under_way: deque[tuple[Landing, Landing]] = deque()

    def add(self, tensor: Tensor, *, then: Landing = lambda: None) -> None:
        """Begin one as soon as fewer than ``MAX_IN_FLIGHT`` are under way.

        ``then`` is called when it has ended, and the next one has begun: the link does not wait for it.
        """
        ended = self._land_first() if len(self._under_way) == MAX_IN_FLIGHT else None
        self._under_way.append((self._begin(tensor), then))
        if ended is not None:
            ended()

    def land(self) -> None:
        """Wait for all."""
        while self._under_way:
            self._land_first()()

    def _land_first(self) -> Landing:
        """What is to be called now; where one fails the others are let go: its traceback keeps all that this knows."""
        landing, then = self._under_way.popleft()
        try:
            landing()
        except BaseException:
            self._under_way.clear()
            raise
        return then


def broadcast_all(tensors: Iterable[Tensor], begin: Callable[[Tensor], Landing]) -> None:
    """Broadcast one after the other, and wait for all; ``tensors`` may be made as they are needed."""
    flight = Flight(begin)
    for tensor in tensors:
        flight.add(tensor)
    flight.land()
