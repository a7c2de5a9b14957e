"""Segments into rows: never split, never dropped, oldest first, filled as well as can be. Needs no torch.

Membership is decided from true encoded lengths, once a target exists. What does not fit a row waits
to the next one; nothing is ever split or dropped. The choice is an exact subset sum over big-integer
bitsets: O(n * capacity / word) time and n * capacity / 8 bytes, about a millisecond for 512 segments and
a row of 16k tokens. Source: Bellman 1957 for the subset sum.
"""

from collections.abc import Iterable, Sequence

from rollmatch.errors import LearnError
from rollmatch.model.overlong import too_long
from rollmatch.records import Row, Segment


def fullest_subset(lengths: Sequence[int], *, capacity: int) -> tuple[int, ...]:
    """Indices, ascending, of the subset with the largest sum that fits.

    Among equal sums the older (lower) indices win: the first index is as low as it can be, then the
    second, and so on.

    >>> fullest_subset([3, 2, 2], capacity=4)
    (1, 2)
    >>> fullest_subset([3, 2, 2, 2], capacity=4)
    (1, 2)
    >>> fullest_subset([5], capacity=4)
    ()
    """
    within = (1 << (capacity + 1)) - 1
    reachable = [1]  # bit s of the entry for item i: items i, i+1, ... can sum to s
    for length in reversed(lengths):
        reachable.append((reachable[-1] | reachable[-1] << length) & within)
    reachable.reverse()
    left = reachable[0].bit_length() - 1
    chosen = []
    for index, length in enumerate(lengths):
        if length <= left and reachable[index + 1] >> (left - length) & 1:
            chosen.append(index)
            left -= length
    return tuple(chosen)


def pack(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Indices of the sequences of each row, by the rule of ``Packer``; ``lengths`` and ``capacity`` in tokens.

    Errors: ``ValueError`` for a sequence that is longer than a row.

    >>> pack([5, 3, 2, 2, 7], capacity=7)
    [[0, 2], [1, 3], [4]]
    """
    if max(lengths, default=0) > capacity:
        raise ValueError(f"a sequence of {max(lengths)} tokens does not fit a row of {capacity}")
    rows, waiting = [], list(range(len(lengths)))
    while waiting:
        oldest, *younger = waiting
        chosen = fullest_subset([lengths[index] for index in younger], capacity=capacity - lengths[oldest])
        rows.append([oldest, *(younger[place] for place in chosen)])
        waiting = [index for place, index in enumerate(younger) if place not in set(chosen)]
    return rows


class Packer:
    """Rank-local buffer of segments that hands out rows; the buffer outlives optimizer steps.

    ``capacity`` is ``global_max_length`` in tokens, ``max_buffered`` the most segments that ``add`` leaves waiting.
    """

    def __init__(self, capacity: int, *, max_buffered: int | None = None) -> None:
        self.capacity = capacity
        self.max_buffered = max_buffered
        self._buffer: list[Segment] = []

    @property
    def buffered(self) -> int:
        """Number of segments that wait for a row."""
        return len(self._buffer)

    def add(self, segments: Iterable[Segment]) -> None:
        """Append all of them, or none. Errors: ``SegmentTooLong``, ``packing-buffer-full``."""
        self._buffer = self._checked([*self._buffer, *segments])

    def pop_row(self, *, rows_to_follow: int = 0) -> Row:
        """Take the oldest segment and the companions that fill its row best, in insertion order.

        As many of the youngest segments as ``rows_to_follow`` stay behind, so that no later row of the same optimizer
        step is left empty. Errors: ``nothing-to-pack``.
        """
        num_eligible = len(self._buffer) - rows_to_follow
        if num_eligible < 1:
            raise LearnError(
                f"{self.buffered} segments wait for {rows_to_follow + 1} rows",
                code="nothing-to-pack",
                key="training.packing",
                remedy="Add at least one segment per row.",
            )
        held_back = self._buffer[num_eligible:]
        oldest, *younger = self._buffer[:num_eligible]
        tokens_left = self.capacity - oldest.encoded_len
        chosen = frozenset(fullest_subset([segment.encoded_len for segment in younger], capacity=tokens_left))
        companions = [segment for index, segment in enumerate(younger) if index in chosen]
        self._buffer = [segment for index, segment in enumerate(younger) if index not in chosen] + held_back
        return Row(segments=(oldest, *companions), capacity=self.capacity)

    def state(self) -> list[Segment]:
        """The buffer, oldest first; ``restore`` of it continues exactly as this packer would."""
        return list(self._buffer)

    def restore(self, segments: Iterable[Segment]) -> None:
        """Replace the buffer by a saved ``state``. Errors: as ``add``."""
        self._buffer = self._checked(list(segments))

    def _checked(self, buffer: list[Segment]) -> list[Segment]:
        for segment in buffer:
            if segment.encoded_len > self.capacity:
                raise too_long(segment, self.capacity)
        if self.max_buffered is not None and len(buffer) > self.max_buffered:
            raise LearnError(
                f"{len(buffer)} segments would wait in a buffer of {self.max_buffered}",
                code="packing-buffer-full",
                key="max_buffered",
                remedy="Take rows before more segments are added, or raise it.",
            )
        return buffer


def starts_of_padded(segments: Sequence[Segment]) -> range:
    """Where each segment of a right-padded batch starts, the batch read as one list; it ends at ``stop``."""
    padded_len = max(segment.encoded_len for segment in segments)
    return range(0, padded_len * len(segments), padded_len)
