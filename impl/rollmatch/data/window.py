"""Which samples are rolled out together, and the optimizer steps that learn from them.

A *window* is one generation: the samples of ``steps_per_generation`` consecutive optimizer steps, rolled out by the
weights of the first of them and learnt from ``num_iterations`` times, in the same order each time. With 1 and 1 every
optimizer step is a window of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, cycle, islice

from rollmatch.data.order import LearnerOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """How samples become optimizer steps. Made by ``trainer``."""

    batch_size: int = 1
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
    """One generation of one rank. Made by ``WindowPlan``, eaten by ``trainer`` and whatever generates ahead."""

    epoch: int
    first_step: int
    """The optimizer step before which it is rolled out."""
    parts: tuple[tuple[int, ...], ...]
    """Indices of this rank's samples, one part per optimizer step of a pass."""
    num_iterations: int = 1
    """Passes over the parts."""

    @property
    def end_step(self) -> int:
        """The first optimizer step that learns from something else."""
        return self.first_step + len(self.parts) * self.num_iterations

    @property
    def sample_indices(self) -> tuple[int, ...]:
        """All samples, in the order of the requests."""
        return tuple(chain.from_iterable(self.parts))

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

    def __init__(self, num_samples: int, *, seed: int, shape: StepShape, rank: int = 0) -> None:
        self.shape = shape
        self.rank = rank
        self._order = ReusedOrder(LearnerOrder(num_samples, seed=seed), shape)
        self._steps_of_epoch = lru_cache(maxsize=2)(self._cut_epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps until all samples were gone through."""
        return -(-len(self._order) // self.shape.samples_per_step)

    def at(self, step: int) -> Window:
        """The window that an optimizer step (from 0) belongs to.

        >>> plan = WindowPlan(8, seed=1, shape=StepShape(batch_size=2, steps_per_generation=2))
        >>> window = plan.at(3)
        >>> window.first_step, window.end_step, len(window.sample_indices), plan.at(2) == window
        (2, 4, 4, True)
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        steps = self._steps_of_epoch(epoch)
        length = self.shape.steps_per_generation * self.shape.num_iterations
        start = place - place % length
        uses = steps[start : start + length]
        return Window(
            epoch=epoch,
            first_step=epoch * self.steps_per_epoch + start,
            parts=tuple(uses[: len(uses) // self.shape.num_iterations]),
            num_iterations=self.shape.num_iterations,
        )

    def _cut_epoch(self, epoch: int) -> tuple[tuple[int, ...], ...]:
        """This rank's samples of each optimizer step of an epoch, as accelerate deals batches to ranks.

        Ranks take whole batches by turns; what the last round lacks is taken from the beginning of the epoch.
        """
        shape = self.shape
        self._order.set_epoch(epoch)
        indices = list(self._order)
        round_size = shape.batch_size * shape.learner_world_size
        if shape.learner_world_size > 1:
            indices = list(islice(cycle(indices), -(-len(indices) // round_size) * round_size))
        rounds = [indices[start : start + round_size] for start in range(0, len(indices), round_size)]
        first = self.rank * shape.batch_size
        mine = [samples[first : first + shape.batch_size] for samples in rounds]
        starts = range(0, len(mine), shape.accumulation)
        return tuple(tuple(chain.from_iterable(mine[start : start + shape.accumulation])) for start in starts)
