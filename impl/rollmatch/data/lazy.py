"""Samples of a large data set, read from the disk when they are used: an index of 8 bytes a sample stays in memory."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Self, overload

import numpy as np
from numpy.typing import NDArray

from rollmatch.records import Sample

BLOCK_BYTES = 2**24
"""How much of a file is looked through at once."""

MOST_SPREAD = 2_000
"""Lazy samples that a check looks at where it would take too long to look at all."""

Ints = NDArray[np.int64]
ReadSample = Callable[[int], Sample]


class LazySamples(Sequence[Sample]):
    """A sequence whose samples are made again at each use, in the order of ``places``.

    ``read`` makes the sample at a place of the data set, which is the sample's id. A slice is lazy, too.

    >>> samples = LazySamples(lambda place: place * 10, np.arange(5), num_objects=0)
    >>> samples[1], list(samples[3:]), list(samples.select([4, 0])), len(samples[:2])
    (10, [30, 40], [40, 0], 2)
    """

    def __init__(
        self,
        read: ReadSample,
        places: Ints,
        *,
        num_objects: int | None,
        fingerprint: str = "",
        dropped: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.read = read
        self.places = places
        self.fingerprint = fingerprint
        """Of a file of which all lines were looked at and none is bad; else empty."""
        self.num_objects = num_objects
        """Of the whole data set; None where not all of it was looked at."""
        self.dropped = dropped
        """Why boxes were left out -> their number, as far as the data set was looked at."""

    @property
    def shown_dropped(self) -> str:
        """What was left out, for people."""
        return "".join(f"; dropped: {number} x {reason}" for reason, number in self.dropped.items())

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Sample | Self:
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        return self.read(int(self.places[index]))

    def select(self, indices: Sequence[int] | Ints) -> Self:
        """Some of the samples, in the order of ``indices``."""
        return type(self)(self.read, self.places[np.asarray(indices, dtype=np.int64)], num_objects=self.num_objects)


def samples_by_id(samples: Sequence[Sample], ids: Iterable[int]) -> dict[int, Sample]:
    """The samples of these ids, without those that are not there; of lazy ones no other is read.

    >>> list(samples_by_id(LazySamples(lambda place: place * 10, np.array([2, 5]), num_objects=0), [5, 3]).items())
    [(5, 50)]
    """
    wanted = frozenset(ids)
    if isinstance(samples, LazySamples):
        return {sample_id: samples.read(sample_id) for sample_id in sorted(wanted) if sample_id in samples.places}
    return {sample.sample_id: sample for sample in samples if sample.sample_id in wanted}


def spread(samples: Sequence[Sample]) -> Sequence[Sample]:
    """All samples; of lazy ones at most ``MOST_SPREAD``, evenly from first to last, where each would be read again."""
    if not isinstance(samples, LazySamples) or len(samples) <= MOST_SPREAD:
        return samples
    return samples.select(np.linspace(0, len(samples) - 1, MOST_SPREAD).astype(np.int64))


class LineIndex:
    """Where the lines of a file begin; lines end at line feeds only."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        ends = [np.zeros(1, dtype=np.int64)]
        with open(path, "rb") as file:
            for start in range(0, os.fstat(file.fileno()).st_size, BLOCK_BYTES):
                block = file.read(BLOCK_BYTES)
                ends.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + start + 1)
            size = file.tell()
        found = np.concatenate(ends)
        self.starts: Ints = found if found[-1] == size else np.append(found, size)
        """[lines + 1] first byte of each line, and the size of the file."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def line(self, place: int) -> bytes:
        """One line, without its line feed."""
        start, end = self.starts[place : place + 2].tolist()
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(end - start).removesuffix(b"\n")

    def __iter__(self) -> Iterator[bytes]:
        """All lines, one after the other."""
        with open(self.path, "rb") as file:
            for line in file:
                yield line.removesuffix(b"\n")
