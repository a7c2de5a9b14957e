"""The order in which the learner walks through its samples."""

from collections.abc import Iterator

import numpy as np


class LearnerOrder:
    """A permutation of all samples for each epoch, from (seed, epoch) alone; torch's sampler protocol, without torch.

    Every rank and every resumed run that names the same seed and epoch sees the same order.

    >>> order = LearnerOrder(5, seed=1)
    >>> sorted(order), list(order) == list(order), len(order)
    ([0, 1, 2, 3, 4], True, 5)
    """

    def __init__(self, num_samples: int, *, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = np.random.default_rng([self.seed, self.epoch])
        return iter(generator.permutation(self.num_samples).tolist())

    def __len__(self) -> int:
        return self.num_samples
