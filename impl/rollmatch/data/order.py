"""The order in which the learner walks through its samples, and the windows that it is cut into. Needs no torch.

A *window* is one generation: the samples of ``steps_per_generation`` consecutive optimizer steps, rolled out by the
weights of the first of them and learnt from ``num_iterations`` times, in the same order each time. With 1 and 1 every
optimizer step is a window of its own.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, cycle, islice, pairwise
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from rollmatch.errors import LearnError
from rollmatch.records import Sample

Item = TypeVar("Item")


def split_evenly(items: Sequence[Item], num_parts: int) -> list[Sequence[Item]]:
    """Contiguous parts whose sizes differ by at most one, larger ones first.

    >>> split_evenly([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    size, extra = divmod(len(items), num_parts)
    starts = [part * size + min(part, extra) for part in range(num_parts + 1)]
    return [items[start:end] for start, end in pairwise(starts)]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """How often rollouts are learnt from."""

    num_rollouts: int = 1
    """Responses requested per training sample, each with a seed of its own."""
    steps_per_generation: int = 1
    """Optimizer steps whose samples are rolled out together."""
    num_iterations: int = 1
    """Passes over them."""

    def repeat(self, samples: Sequence[Sample]) -> list[Sample]:
        """A place per rollout: each sample as often as it is answered."""
        return [sample for sample in samples for _ in range(self.num_rollouts)]

    def group(self, items: Sequence[Item]) -> tuple[tuple[Item, ...], ...]:
        """One item per rollout -> those of each sample together.

        >>> Reuse(num_rollouts=2).group([5, 6, 7, 8])
        ((5, 6), (7, 8))
        """
        size = self.num_rollouts
        return tuple(tuple(items[start : start + size]) for start in range(0, len(items), size))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """How samples become optimizer steps. Made by ``training``."""

    batch_size: int
    """Samples per rank and forward pass."""
    accumulation: int = 1
    """Forward passes per optimizer step."""
    learner_world_size: int = 1
    steps_per_generation: int = 1
    num_iterations: int = 1

    @property
    def samples_per_step(self) -> int:
        """Samples of all ranks."""
        return self.batch_size * self.accumulation * self.learner_world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One generation of one rank. Made by ``WindowPlan``, used by ``training`` and whatever generates ahead."""

    epoch: int
    first_step: int
    """The optimizer step before which it is rolled out."""
    parts: tuple[tuple[int, ...], ...]
    """Indices of this rank's samples, one part per optimizer step of a pass."""
    num_iterations: int
    """Passes over the parts."""

    @property
    def end_step(self) -> int:
        """The first optimizer step that learns from something else."""
        return self.first_step + len(self.parts) * self.num_iterations

    @property
    def sample_indices(self) -> tuple[int, ...]:
        """All samples, in the order of the requests."""
        return tuple(chain.from_iterable(self.parts))

    def by_part(self, items: Sequence[Sequence[Item]]) -> tuple[tuple[Item, ...], ...]:
        """Items of each sample -> items of each part.

        >>> Window(epoch=0, first_step=8, parts=((3, 1), (0, 2)), num_iterations=1).by_part(["a", "bc", "", "d"])
        (('a', 'b', 'c'), ('d',))
        """
        of_sample = iter(items)
        return tuple(tuple(chain.from_iterable(next(of_sample) for _ in part)) for part in self.parts)

    def part_of(self, step: int) -> int:
        """The part that an optimizer step of the window learns from.

        >>> window = Window(epoch=0, first_step=8, parts=((3, 1), (0, 2)), num_iterations=2)
        >>> [window.part_of(step) for step in range(8, window.end_step)]
        [0, 1, 0, 1]
        """
        return (step - self.first_step) % len(self.parts)


class ReusedOrder:
    """The learner's order with every window as often as it is learnt from; torch's sampler protocol.

    With several passes only whole optimizer steps count: what is left of an epoch waits for another one, and a data set
    smaller than a step is gone through again until it fills one.

    >>> order = LearnerOrder(5, seed=1)
    >>> shape = StepShape(batch_size=2, num_iterations=2)
    >>> first = list(order)
    >>> list(ReusedOrder(order, shape)) == [*first[:2], *first[:2], *first[2:4], *first[2:4]]
    True
    """

    def __init__(self, order: LearnerOrder, shape: StepShape) -> None:
        self.order = order
        self.shape = shape

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.order.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        if self.shape.num_iterations == 1:
            return iter(self.order)
        size, once = self.shape.samples_per_step, list(islice(cycle(self.order), self._num_distinct))
        window_size = size * self.shape.steps_per_generation
        windows = (once[start : start + window_size] for start in range(0, len(once), window_size))
        return chain.from_iterable(window * self.shape.num_iterations for window in windows)

    def __len__(self) -> int:
        if self.shape.num_iterations == 1:
            return len(self.order)
        return self._num_distinct * self.shape.num_iterations

    @property
    def _num_distinct(self) -> int:
        size = self.shape.samples_per_step
        return max(len(self.order) // size, 1) * size


class WindowPlan:
    """Every window of a run, of one rank, from (seed, shape, number of samples) alone: known before it is needed."""

    def __init__(self, num_samples: int, *, seed: int, shape: StepShape, rank: int) -> None:
        self.shape = shape
        self.rank = rank
        self._order = ReusedOrder(LearnerOrder(num_samples, seed=seed), shape)
        self._indices_of_epoch = lru_cache(maxsize=2)(self._deal)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps until all samples were gone through."""
        return -(-len(self._order) // self.shape.samples_per_step)

    def at(self, step: int) -> Window:
        """The window that an optimizer step (from 0) belongs to.

        >>> plan = WindowPlan(8, seed=1, shape=StepShape(batch_size=2, steps_per_generation=2), rank=0)
        >>> window = plan.at(3)
        >>> window.first_step, window.end_step, len(window.sample_indices), plan.at(2) == window
        (2, 4, 4, True)
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        mine, size = self._indices_of_epoch(epoch), self.shape.batch_size * self.shape.accumulation
        length = self.shape.steps_per_generation * self.shape.num_iterations
        start = place - place % length
        steps = range(start, min(start + length, self.steps_per_epoch))
        uses = [tuple(mine[step * size : (step + 1) * size].tolist()) for step in steps]
        return Window(
            epoch=epoch,
            first_step=epoch * self.steps_per_epoch + start,
            parts=tuple(uses[: len(uses) // self.shape.num_iterations]),
            num_iterations=self.shape.num_iterations,
        )

    def further(self, step: int, taken: Collection[int]) -> list[int]:
        """All samples but ``taken`` in an order of the step's own, the same on every rank.

        >>> plan = WindowPlan(8, seed=1, shape=StepShape(batch_size=2), rank=0)
        >>> taken = plan.at(3).sample_indices
        >>> sorted([*plan.further(3, taken), *taken]) == list(range(8)), plan.further(3, ()) == plan.further(4, ())
        (True, False)
        """
        chance = np.random.default_rng([self._order.order.seed, step, 1])  # an epoch's order has two numbers
        order = chance.permutation(len(self._order.order))
        return cast(list[int], order[~np.isin(order, list(taken))].tolist())

    def _deal(self, epoch: int) -> NDArray[np.int64]:
        """This rank's samples of an epoch, in their order, as accelerate deals batches to ranks.

        Ranks take whole batches by turns; what the last round lacks is taken from the beginning of the epoch.
        """
        shape = self.shape
        self._order.set_epoch(epoch)
        indices = np.fromiter(self._order, dtype=np.int64, count=len(self._order))
        if shape.learner_world_size == 1:
            return indices
        round_size = shape.batch_size * shape.learner_world_size
        rounds = np.resize(indices, (-(-len(indices) // round_size), shape.learner_world_size, shape.batch_size))
        return rounds[:, self.rank].ravel()


def check_order(micro_batches: Sequence[Sequence[Sample]], planned: Sequence[Sample], *, step: int) -> None:
    """Compare what a data loader brought with the learner's own order. Errors: ``order-disagrees``."""
    brought, named = [s.sample_id for s in chain(*micro_batches)], [s.sample_id for s in planned]
    if brought != named:
        raise LearnError(
            f"the data loader yields samples {brought[:8]} for step {step}, the learner's order names {named[:8]}",
            code="order-disagrees",
            key="training",
            remedy="Leave sampling to the learner: no group_by_length, no dataloader settings that regroup batches.",
        )
