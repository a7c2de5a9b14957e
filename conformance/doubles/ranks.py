"""Learner ranks without processes: alone, or several threads that wait for each other where ranks would."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Member:
    """One rank, with what ``ranks.Ranks`` offers of exchange."""

    rank: int
    learner_world_size: int
    table: "Table"

    def gather(self, item: Any) -> list[Any]:
        return self.table.exchange(self.rank, item)

    def sum(self, numbers: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*self.gather(list(numbers)), strict=True)]


class Table:
    """Where ranks lay down what they send each other."""

    def __init__(self, size: int) -> None:
        self.items: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=10)

    def exchange(self, rank: int, item: Any) -> list[Any]:
        self.items[rank] = item
        self.barrier.wait()
        shared = list(self.items)
        self.barrier.wait()
        return shared


def alone() -> Member:
    """A learner of one rank."""
    return Member(0, 1, Table(1))


def together(size: int, work: Callable[[Member], Any]) -> list[Any]:
    """What ``work`` returns on each of ``size`` ranks that run at the same time."""
    table = Table(size)
    members = [Member(rank, size, table) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, members))


class NoJournal:
    """A journal that nobody reads."""

    def write(self, event, **fields):
        return fields
