"""Images of coming samples, prepared by threads while the learner waits for rollouts or learns.

Threads, not processes: decoding and the processor's arithmetic release the interpreter's lock, and the tensors of a
large image (30 MB at 1280 x 960) need no way back.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial

import torch

from rollmatch.model.images import ImageFeatures
from rollmatch.records import Sample

MOST_THREADS = 8


class ImagePreparation:
    """Features of samples' images, each prepared once; ``prepare`` makes those of one sample."""

    def __init__(self, prepare: Callable[[Sample], ImageFeatures]) -> None:
        self._prepare = prepare
        self._begun: dict[tuple[str, ...], Future[ImageFeatures]] = {}

    def begin(self, samples: Iterable[Sample]) -> None:
        """Prepare in the background what is not under way; samples without images cost nothing."""
        for sample in samples:
            if sample.images and sample.images not in self._begun:
                self._begun[sample.images] = self._pool.submit(self._prepare, sample)

    def collect(self, samples: Iterable[Sample]) -> dict[int, ImageFeatures]:
        """Features by sample id; they are not kept. Errors: those of ``prepare``."""
        by_id = {sample.sample_id: sample for sample in samples}
        self.begin(by_id.values())
        features = {
            sample_id: self._begun[sample.images].result() if sample.images else self._prepare(sample)
            for sample_id, sample in by_id.items()
        }
        for sample in by_id.values():
            self._begun.pop(sample.images, None)
        return features

    def close(self) -> None:
        """Drop what nobody will collect."""
        for future in self._begun.values():
            future.cancel()
        self._begun.clear()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        # torch's own threads, which are counted per thread, would only get in each other's way.
        return ThreadPoolExecutor(num_threads(), "images", initializer=partial(torch.set_num_threads, 1))


def num_threads() -> int:
    """Threads of this learner rank: its share of the machine's cores, at most ``MOST_THREADS``."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST_THREADS, (os.cpu_count() or 1) // num_ranks))
