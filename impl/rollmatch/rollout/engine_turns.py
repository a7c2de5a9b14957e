"""Turns that an engine in this process writes: each joins those under way as soon as it is requested.

Episodes request turns from threads of their own. The engine is the main thread's, which takes in what was requested,
runs a step, and hands out what has ended, until the episodes are over. Needs no torch.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Protocol

from rollmatch.errors import FAILURES
from rollmatch.records import Rollout, RolloutRequest


class SteppedEngine(Protocol):
    """An engine that runs a step at a time."""

    def add(self, request: RolloutRequest) -> str:
        """Let a request join those under way; returns its name."""

    def step(self) -> Mapping[str, Rollout]:
        """Write a token of each request under way; returns what has ended, by name."""

    def abort(self, names: Sequence[str]) -> None:
        """Forget requests under way."""


class EngineTurns:
    """Satisfies ``TurnWriter``."""

    def __init__(self, engine: SteppedEngine) -> None:
        self.engine = engine
        self._requested: SimpleQueue[tuple[RolloutRequest, Future[Rollout]] | None] = SimpleQueue()
        """None: an episode has ended."""
        self._is_over = False

    def write(self, place: int, request: RolloutRequest) -> Rollout:
        """As ``WriteTurn``. Errors: those of the engine's ``add``; ``CancelledError`` once ``drive`` has returned."""
        turn: Future[Rollout] = Future()
        self._requested.put((request, turn))
        if self._is_over:
            turn.cancel()
        return turn.result()

    def drive(self, episodes: Collection[Future[None]]) -> None:
        """As ``TurnWriter``. Errors: those of the engine's ``step``."""
        under_way: dict[str, Future[Rollout]] = {}
        for episode in episodes:
            episode.add_done_callback(lambda _: self._requested.put(None))
        try:
            while not _are_over(episodes):
                self._take_in(under_way)
                if under_way:
                    for name, rollout in self.engine.step().items():
                        under_way.pop(name).set_result(rollout)
        finally:
            self._is_over = True  # a turn that is requested from now on sees it, or is found in the queue
            for turn in (*under_way.values(), *self._left()):
                turn.cancel()
            self.engine.abort(list(under_way))

    def _take_in(self, under_way: dict[str, Future[Rollout]]) -> None:
        """What was requested; waits for a request, or an episode's end, where nothing is under way."""
        is_waiting = not under_way
        while True:
            try:
                requested = self._requested.get(block=is_waiting)
            except Empty:
                return
            is_waiting = False
            if requested is not None:
                request, turn = requested
                try:
                    under_way[self.engine.add(request)] = turn
                except FAILURES as error:
                    turn.set_exception(error)

    def _left(self) -> list[Future[Rollout]]:
        left = []
        while not self._requested.empty():
            requested = self._requested.get()
            if requested is not None:
                left.append(requested[1])
        return left


def _are_over(episodes: Collection[Future[None]]) -> bool:
    """Whether all have ended, or one has failed."""
    ended = [episode for episode in episodes if episode.done()]
    return len(ended) == len(episodes) or any(episode.exception() is not None for episode in ended)
