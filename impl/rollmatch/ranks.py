"""This process as a learner rank: its place, and what ranks exchange."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
import torch.distributed as dist

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's place in the learner. What ranks exchange, all call in the same order, from the main thread."""

    rank: int = 0
    learner_world_size: int = 1
    group: dist.ProcessGroup | None = None
    """That of one other thread, see ``apart``; None: of the main thread."""

    @classmethod
    def from_environment(cls) -> "Ranks":
        """As torchrun (or ``accelerate launch``) set it; a plain process is rank 0 of 1."""
        return cls(rank=int(os.environ.get("RANK", "0")), learner_world_size=int(os.environ.get("WORLD_SIZE", "1")))

    @property
    def is_primary(self) -> bool:
        """Rank 0 writes files and prints.

        >>> [Ranks(rank=rank, learner_world_size=2).is_primary for rank in range(2)]
        [True, False]
        """
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.learner_world_size > 1:
            dist.barrier(group=self.group)

    def apart(self) -> "Ranks":
        """The same ranks for one other thread, whose exchanges have an order of their own. All ranks call it."""
        return self if self.learner_world_size == 1 else replace(self, group=dist.new_group(backend="gloo"))

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """[n] -> [n] summed over ranks, in float64."""
        if self.learner_world_size == 1:
            return list(numbers)
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        total = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=self.group)
        return [float(number) for number in total.tolist()]

    def gather(self, item: _Item) -> list[_Item]:
        """One picklable item per rank -> all of them, in rank order, on every rank."""
        if self.learner_world_size == 1:
            return [item]
        items: list[_Item | None] = [None] * self.learner_world_size
        dist.all_gather_object(items, item, group=self.group)
        return cast(list[_Item], items)
