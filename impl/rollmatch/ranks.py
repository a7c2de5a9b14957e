"""This process as a learner rank: its place, what ranks exchange, and the journal that each of them writes."""

import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar, cast

import torch
import torch.distributed as dist

from rollmatch.journal import Event, end_last_line

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's place in the learner. What ranks exchange, all call in the same order, from the main thread."""

    rank: int = 0
    learner_world_size: int = 1

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
            dist.barrier()

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """[n] -> [n] summed over ranks, in float64."""
        if self.learner_world_size == 1:
            return list(numbers)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        total = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return [float(number) for number in total.tolist()]

    def gather(self, item: _Item) -> list[_Item]:
        """One picklable item per rank -> all of them, in rank order, on every rank."""
        if self.learner_world_size == 1:
            return [item]
        items: list[_Item | None] = [None] * self.learner_world_size
        dist.all_gather_object(items, item)
        return cast(list[_Item], items)


class Journal:
    """Appends events to ``journal.jsonl``; every line is flushed, so that a killed run keeps what it wrote."""

    def __init__(self, path: Path, *, rank: int = 0) -> None:
        self.path = path
        self.rank = rank
        path.parent.mkdir(parents=True, exist_ok=True)
        end_last_line(path)
        self._lock = threading.Lock()
        path.touch(mode=0o600)  # problems of servers are quoted, and may hold what nobody else should read
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, event: str, **fields: object) -> Event:
        """Append one event and return it. ``time`` is in unix seconds."""
        line = {"event": event, "time": round(time.time(), 3), "rank": self.rank, **fields}
        with self._lock:  # calls beside learning write from their own threads
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()
        return line

    def close(self) -> None:
        """Close the file."""
        self._file.close()
