"""Segments of an optimizer step shared out among its micro-batches, and among ranks."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from rollmatch.data.order import split_evenly
from rollmatch.ranks import Ranks
from rollmatch.records import Row, Segment


def spread_longest_first(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices, ascending, of the sequences of each part; parts have about as many tokens.

    Longest first, each into the part with the fewest tokens so far (Graham's rule: at most 4/3 of the best maximum).

    >>> spread_longest_first([9, 1, 8, 2, 7, 3], 2)
    [[0, 1, 3, 5], [2, 4]]
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    fewest = [(0, part) for part in range(num_parts)]
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        total, part = fewest[0]
        parts[part].append(index)
        heapq.heapreplace(fewest, (total + lengths[index], part))
    return [sorted(part) for part in parts]


def balance(lengths: Sequence[int], *, capacity: int, num_ranks: int) -> list[list[list[int]]]:
    """[rank][row] indices of the sequences of a row, of ``capacity`` tokens at most; ``lengths`` in tokens.

    Every rank gets as many rows, the fewest in which ``spread_longest_first`` finds room. Rows at the end may be empty;
    the first of each rank is not, if there are as many sequences as ranks. Errors: ``ValueError`` for a sequence that
    is longer than a row.

    >>> balance([5, 3, 2, 2, 7, 1], capacity=7, num_ranks=1)
    [[[4], [0, 3], [1, 2, 5]]]
    >>> balance([5, 3, 2, 2, 7, 1], capacity=7, num_ranks=2)
    [[[4], [1, 5]], [[0], [2, 3]]]
    >>> balance([6, 6, 6], capacity=7, num_ranks=2)
    [[[0], [2]], [[1], []]]
    """
    if max(lengths, default=0) > capacity:
        raise ValueError(f"a sequence of {max(lengths)} tokens does not fit a row of {capacity}")
    num_rows = max(1, -(-sum(lengths) // (capacity * num_ranks)))
    while True:
        rows = spread_longest_first(lengths, num_rows * num_ranks)
        if max(sum(lengths[index] for index in row) for row in rows) <= capacity:
            return [rows[rank::num_ranks] for rank in range(num_ranks)]
        num_rows += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBalancer:
    """Rows of the passes of an optimizer step, without padding, of about as many tokens each."""

    ranks: Ranks
    capacity: int | None
    """``training.tokens_per_micro_batch``; None: each rank has a fixed number of rows for the segments it made."""

    def rows_of(self, segments: Sequence[Segment], *, num_rows: int) -> list[Row]:
        """Rows of this rank, as many as those of any other; all ranks call it, each with the segments it made.

        With a capacity ``num_rows`` says nothing, segments that another rank learns from are exchanged, and a row at
        the end may be empty. Errors: ``ValueError`` for a segment that is longer than a row.
        """
        if self.capacity is not None:
            return [Row(segments=part, capacity=self.capacity) for part in self._balanced(segments, self.capacity)]
        parts = split_by_tokens(segments, num_rows)
        return [Row(segments=part, capacity=sum(one.encoded_len for one in part)) for part in parts]

    def _balanced(self, segments: Sequence[Segment], capacity: int) -> list[tuple[Segment, ...]]:
        lengths = self.ranks.gather([segment.encoded_len for segment in segments])
        rows = balance([*chain(*lengths)], capacity=capacity, num_ranks=self.ranks.learner_world_size)
        mine = rows[self.ranks.rank]
        first, staying = sum(map(len, lengths[: self.ranks.rank])), {*chain(*mine)}
        known = dict(enumerate(segments, start=first))
        leaving = {index: segment for index, segment in known.items() if index not in staying}
        for arrived in self.ranks.gather(leaving):
            known |= arrived
        return [tuple(known[index] for index in row) for row in mine]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSize:
    """Size of a pass without gradients: a number of segments, padded to the longest, or a number of tokens, packed."""

    segments: int
    tokens: int | None = None
    """Decides where it is given."""

    def fitting(self, length: int) -> "PassSize":
        """One that a segment of ``length`` tokens fits, too: teachers may have longer prompts."""
        return self if self.tokens is None else replace(self, tokens=max(self.tokens, length))

    def split(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices of the segments of each pass; similar lengths share a padded batch.

        >>> PassSize(segments=2).split([5, 2, 4]), PassSize(segments=2, tokens=6).split([5, 2, 4])
        ([[1, 2], [0]], [[0], [1, 2]])
        """
        if self.tokens is not None:
            return balance(lengths, capacity=self.tokens, num_ranks=1)[0] if lengths else []
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        return [order[start : start + self.segments] for start in range(0, len(order), self.segments)]


def split_by_tokens(segments: Sequence[Segment], num_parts: int) -> list[tuple[Segment, ...]]:
    """Parts of about as many tokens each, none of them empty, segments of a part in their given order.

    >>> from rollmatch.records import Sample
    >>> sample = Sample(sample_id=0, origin="x:1", images=(), objects=(), width=8, height=8)
    >>> def segment(length):
    ...     return Segment(sample=sample, policy_version=1, token_ids=(7,) * length, prompt_len=1, prefix_len=0)
    >>> parts = split_by_tokens([segment(length) for length in (9, 1, 8, 2, 7, 3)], 2)
    >>> [[one.encoded_len for one in part] for part in parts]
    [[9, 1, 2, 3], [8, 7]]
    """
    parts = spread_longest_first([segment.encoded_len for segment in segments], num_parts)
    return [tuple(segments[index] for index in part) for part in parts]


def split_by_length(segments: Sequence[Segment], num_parts: int) -> list[tuple[Segment, ...]]:
    """Parts of about as many segments each, of similar lengths, longest first; segments of a part in their given order.

    >>> from rollmatch.records import Sample
    >>> sample = Sample(sample_id=0, origin="x:1", images=(), objects=(), width=8, height=8)
    >>> def segment(length):
    ...     return Segment(sample=sample, policy_version=1, token_ids=(7,) * length, prompt_len=1, prefix_len=0)
    >>> parts = split_by_length([segment(length) for length in (2, 9, 3, 8, 4)], 2)
    >>> [[one.encoded_len for one in part] for part in parts]
    [[9, 8, 4], [2, 3]]
    """
    order = sorted(range(len(segments)), key=lambda index: segments[index].encoded_len, reverse=True)
    return [tuple(segments[index] for index in sorted(part)) for part in split_evenly(order, num_parts)]
