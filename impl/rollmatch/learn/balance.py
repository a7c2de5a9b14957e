"""Segments of an optimizer step shared out among its micro-batches, and among ranks."""

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

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


Cost = tuple[int, int]
"""Tokens that a segment adds to a row: with its whole prompt, and after its neighbour, with which it may share it."""


def costs_of(segments: Sequence[Segment], *, shares_prompts: bool) -> list[Cost]:
    """[S]; the first has no neighbour."""
    alone = [segment.encoded_len for segment in segments]
    pairs = (Row(segments=pair, capacity=0, shares_prompts=shares_prompts) for pair in pairwise(segments))
    after = [row.num_tokens - length for row, length in zip(pairs, alone)]
    return list(zip(alone, [*alone[:1], *after], strict=True))


def tokens_of(row: Sequence[int], costs: Sequence[Cost]) -> int:
    """Tokens of a row of the segments with these indices, ascending.

    >>> tokens_of([0, 1, 3], [(9, 9), (9, 2), (9, 2), (8, 1)])
    19
    """
    return sum(costs[index][before == index - 1] for before, index in pairwise([-2, *row]))


def spread(costs: Sequence[Cost], num_parts: int) -> list[list[int]]:
    """Indices, ascending, of the segments of each part; parts have about as many tokens.

    Neighbours stay together where they share prompts, else ``spread_longest_first`` decides.

    >>> spread([(9, 9), (9, 2), (9, 2), (8, 8), (8, 1)], 2)
    [[0, 1, 2], [3, 4]]
    """
    if all(whole == after for whole, after in costs):
        return spread_longest_first([whole for whole, _ in costs], num_parts)
    return cut_evenly(costs, num_parts)


def cut_evenly(costs: Sequence[Cost], num_parts: int) -> list[list[int]]:
    """Parts of neighbours, such that the largest has the fewest tokens; none is empty if there are segments enough.

    >>> cut_evenly([(9, 9), (9, 2), (9, 2), (8, 8)], 2), cut_evenly([(9, 9), (9, 2)], 3)
    ([[0, 1, 2], [3]], [[0], [1], []])
    """
    limits = range(max((whole for whole, _ in costs), default=0), sum(whole for whole, _ in costs) + 1)
    least = limits[bisect_left(limits, True, key=lambda limit: len(_cut_within(costs, limit)) <= num_parts)]
    parts = _cut_within(costs, least)
    while len(parts) < min(num_parts, len(costs)):
        longest = max(range(len(parts)), key=lambda place: len(parts[place]))
        half = len(parts[longest]) // 2
        parts[longest : longest + 1] = [parts[longest][:half], parts[longest][half:]]
    return parts + [[] for _ in range(num_parts - len(parts))]


def _cut_within(costs: Sequence[Cost], limit: int) -> list[list[int]]:
    """The fewest parts of neighbours of at most ``limit`` tokens each, which every segment fits."""
    parts: list[list[int]] = []
    room = 0
    for index, (whole, after) in enumerate(costs):
        if parts and after <= room:
            parts[-1].append(index)
            room -= after
        else:
            parts.append([index])
            room = limit - whole
    return parts


def balance(costs: Sequence[Cost], *, capacity: int, num_ranks: int) -> list[list[list[int]]]:
    """[rank][row] indices of the segments of a row, of ``capacity`` tokens at most.

    Every rank gets as many rows, the fewest in which ``spread`` finds room. Rows at the end may be empty;
    the first of each rank is not, if there are as many segments as ranks. Errors: ``ValueError`` for a segment that
    is longer than a row.

    >>> balance([(5, 5), (3, 3), (2, 2), (2, 2), (7, 7), (1, 1)], capacity=7, num_ranks=2)
    [[[4], [1, 5]], [[0], [2, 3]]]
    >>> balance([(6, 6), (6, 1), (6, 6)], capacity=7, num_ranks=1)
    [[[0, 1], [2]]]
    """
    if (longest := max((whole for whole, _ in costs), default=0)) > capacity:
        raise ValueError(f"a sequence of {longest} tokens does not fit a row of {capacity}")
    num_rows = max(1, -(-sum(after for _, after in costs) // (capacity * num_ranks)))
    while True:
        rows = spread(costs, num_rows * num_ranks)
        if max(tokens_of(row, costs) for row in rows) <= capacity:
            return [rows[rank::num_ranks] for rank in range(num_ranks)]
        num_rows += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBalancer:
    """Rows of the passes of an optimizer step, without padding, of about as many tokens each."""

    ranks: Ranks
    capacity: int | None
    """``training.tokens_per_micro_batch``; None: each rank has a fixed number of rows for the segments it made."""

    def rows_of(self, segments: Sequence[Segment], *, num_rows: int, shares_prompts: bool = False) -> list[Row]:
        """Rows of this rank, as many as those of any other; all ranks call it, each with the segments it made.

        With a capacity ``num_rows`` says nothing, segments that another rank learns from are exchanged, and a row at
        the end may be empty. Errors: ``ValueError`` for a segment that is longer than a row.
        """
        costs = costs_of(segments, shares_prompts=shares_prompts)
        if self.capacity is not None:
            parts = self._balanced(segments, costs, self.capacity)
        else:
            parts = [tuple(segments[index] for index in part) for part in spread(costs, num_rows)]
        rows = [Row(segments=part, capacity=self.capacity or 0, shares_prompts=shares_prompts) for part in parts]
        return [row if row.capacity else replace(row, capacity=row.num_tokens) for row in rows]

    def _balanced(self, segments: Sequence[Segment], costs: list[Cost], capacity: int) -> list[tuple[Segment, ...]]:
        made = self.ranks.gather(costs)
        rows = balance([*chain(*made)], capacity=capacity, num_ranks=self.ranks.learner_world_size)
        mine = rows[self.ranks.rank]
        first, staying = sum(map(len, made[: self.ranks.rank])), {*chain(*mine)}
        known = dict(enumerate(segments, start=first))
        leaving = {index: segment for index, segment in known.items() if index not in staying}
        for arrived in self.ranks.gather(leaving):
            known |= arrived
        return [tuple(known[index] for index in row) for row in mine]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSize:
    """Size of a pass without gradients: a number of segments, or a number of tokens, packed."""

    segments: int
    tokens: int | None = None
    """Decides where it is given."""
    shares_prompts: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether segments of a pass are concatenated, not padded to the longest."""
        return self.tokens is not None or self.shares_prompts

    def fitting(self, length: int) -> "PassSize":
        """One that a segment of ``length`` tokens fits, too: teachers may have longer prompts."""
        return self if self.tokens is None else replace(self, tokens=max(self.tokens, length))

    def split(self, costs: Sequence[Cost]) -> list[list[int]]:
        """Indices of the segments of each pass; similar lengths share a padded batch, neighbours a prompt.

        >>> costs = [(5, 5), (2, 2), (4, 4)]
        >>> PassSize(segments=2).split(costs), PassSize(segments=2, tokens=6).split(costs)
        ([[1, 2], [0]], [[0], [1, 2]])
        >>> PassSize(segments=2, shares_prompts=True).split(costs)
        [[0, 1], [2]]
        """
        if self.tokens is not None:
            return balance(costs, capacity=self.tokens, num_ranks=1)[0] if costs else []
        order = [*range(len(costs))]
        if not self.shares_prompts:
            order.sort(key=costs.__getitem__)
        return [order[start : start + self.segments] for start in range(0, len(order), self.segments)]


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
