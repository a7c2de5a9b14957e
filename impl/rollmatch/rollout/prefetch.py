"""Rollouts that are made while the learner learns: who may call a server when, and what the learner waits for.

The learner (main thread) asks for windows, collects them in order and holds all calls while weights move; callers
(threads, some per server) take lots of requests off their server's queue, or off another one's where late work moves,
one call at a time. States of a caller::

    waiting --(a lot, not held, room)--> calling --(answer)--> waiting
                                              \\--(error)--> the learner raises it at its next word with us

and of the whole: held (before the first sync, and while weights move) or open. ``hold`` lets no call begin and waits
until none is under way: a call ends under the weights under which it began. Nothing else waits while it holds the
lock, no caller ever waits for the learner except to begin a call, so the two cannot wait for each other.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol

from rollmatch.errors import FAILURES, RolloutError
from rollmatch.records import Rollout, RolloutRequest
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.monitor import Monitor, ThreadMonitor
from rollmatch.rollout.window import FinishedCall, PendingWindow
from rollmatch.rollout.work_items import WorkItem, cut_work_items, next_work_item

POLL_S = 1.0
"""How often a learner that waits looks whether anything still moves."""


class PrefetchDied(RolloutError):
    """Every thread that calls a server lives as long as the run."""

    code = "prefetch-died"


class PrefetchStuck(RolloutError):
    """While the learner waits for rollouts, a call is under way or begins."""

    code = "prefetch-stuck"


class PrefetchOverfull(RolloutError):
    """Rollouts are asked for at most ``max_staleness`` steps ahead."""

    code = "prefetch-overfull"


class RolloutTooOld(RolloutError):
    """What is asked for again is written by the newest weights."""

    code = "rollout-too-old"


class ServerBackend(Protocol):
    """Servers that can be called one by one, from several threads."""

    @property
    def num_servers(self) -> int:
        """At least 1."""

    def generate_on(
        self, server_index: int, requests: Sequence[RolloutRequest], decoding: Decoding, *, start: int
    ) -> list[Rollout]:
        """One rollout per request, in order, by one server in one call; ``start`` is for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchRules:
    """Bounds. ``max_windows`` counts the one that is learnt next; with ``pieces_per_server`` late work moves."""

    max_windows: int
    callers_per_server: int
    pieces_per_server: int = 1
    max_bytes: int = 256 * 2**20
    """Of rollouts that wait; beyond it only the window that is learnt next is asked for."""
    stuck_after_s: float = 8.0


class Prefetch:
    """Windows on their way. All methods but the callers' are the main thread's."""

    def __init__(
        self,
        backend: ServerBackend,
        decoding: Decoding,
        rules: PrefetchRules,
        *,
        monitor: Monitor | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.backend, self.decoding, self.rules, self.clock = backend, decoding, rules, clock
        self.monitor: Monitor = monitor or ThreadMonitor()
        self.windows: dict[int, PendingWindow] = {}
        self.calls: list[FinishedCall] = []
        self._queues: list[deque[WorkItem]] = [deque() for _ in range(backend.num_servers)]
        self._in_flight: dict[WorkItem, float] = {}
        self._held, self._closed = True, False
        self._failure: BaseException | None = None
        for server in range(backend.num_servers):
            for _ in range(rules.callers_per_server):
                self.monitor.start(partial(self._call, server), name=f"rollout-caller-{server}")

    def ask(self, step: int, requests: Sequence[RolloutRequest], parts: Sequence[int]) -> None:
        """Put a window behind those that are on their way. Errors: ``PrefetchOverfull``."""
        with self.monitor:
            if len(self.windows) >= self.rules.max_windows:
                told = f"step {step} is asked for while steps {sorted(self.windows)} are on their way"
                raise PrefetchOverfull(told, key=str(step), remedy="This is a mistake in the program.")
            self.windows[step] = PendingWindow(step, tuple(requests), tuple(parts))
            for lot in cut_work_items(step, parts, self.backend.num_servers, pieces=self.rules.pieces_per_server):
                self._queues[lot.server_index].append(lot)
            self.monitor.tell()

    def collect(self, step: int, *, min_version: int) -> tuple[list[Rollout], int]:
        """All rollouts of a window, in order, none older than ``min_version``; and how many were asked for again.

        Errors: those of the calls, ``PrefetchDied``, ``PrefetchStuck``, ``RolloutTooOld``.
        """
        with self.monitor:
            window = self.windows[step]
            self._wait(lambda: window.is_complete)
            old = window.drop_older(min_version)
            if old:
                self._ask_again(window, old)
                self._wait(lambda: window.is_complete)
                if window.drop_older(min_version):
                    problem = f"step {step} got rollouts of versions before {min_version} again"
                    raise RolloutTooOld(problem, key=str(step), remedy="Is another learner writing to the server?")
            del self.windows[step]
            self.monitor.tell()
            return window.taken(), len(old)

    def wait_for(self, step: int) -> None:
        """Until every call of a window was answered; at once where nobody asked for it. Errors: as ``collect``."""
        with self.monitor:
            window = self.windows.get(step)
            self._wait(lambda: window is None or window.is_complete)

    def next_part(self, step: int, *, taken: Sequence[int]) -> tuple[int, list[Rollout]]:
        """A complete part that was not taken yet, the lowest of several. The window stays. Errors: as ``collect``."""
        with self.monitor:
            window = self.windows[step]
            self._wait(lambda: bool(set(window.complete_parts()) - set(taken)))
            part = min(set(window.complete_parts()) - set(taken))
            start, stop = window.span(part)
            return part, [rollout for rollout in window.rollouts[start:stop] if rollout is not None]

    def has_part(self, step: int, *, taken: Sequence[int]) -> bool:
        """Whether ``next_part`` would not wait. Errors: those of the calls."""
        with self.monitor:
            self._raise_failure()
            return bool(set(self.windows[step].complete_parts()) - set(taken))

    def is_complete(self, step: int) -> bool:
        """Whether a window waits for nothing any more."""
        with self.monitor:
            return self.windows[step].is_complete

    def check(self) -> None:
        """Raise what a caller has failed with; asked between two pieces of work."""
        with self.monitor:
            self._raise_failure()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No call is under way inside, and none begins; callers stay held if the inside fails. Errors: ``collect``."""
        with self.monitor:
            self._held = True
            self._wait(lambda: not self._in_flight)
        yield
        with self.monitor:
            self._held = False
            self.monitor.tell()

    def take_calls(self) -> list[FinishedCall]:
        """Calls that were answered since the last time."""
        with self.monitor:
            calls, self.calls = self.calls, []
            return calls

    def spans_of(self, calls: Sequence[FinishedCall], *, now: float) -> list[list[tuple[float, float]]]:
        """When each server was writing: in ``calls``, and in those under way."""
        spans: list[list[tuple[float, float]]] = [[] for _ in range(self.backend.num_servers)]
        for call in calls:
            spans[call.lot.server_index].append((call.began, call.ended))
        with self.monitor:
            for lot, began in self._in_flight.items():
                spans[lot.server_index].append((began, now))
        return spans

    def close(self) -> None:
        """Let callers end after their call; waits for none."""
        with self.monitor:
            self._closed = True
            self.monitor.tell()

    def _ask_again(self, window: PendingWindow, indices: Sequence[int]) -> None:
        """One lot per run of neighbours of one server, before everything else."""
        servers = [0] * len(window.requests)
        for lot in cut_work_items(window.step, window.parts, self.backend.num_servers):
            servers[lot.start : lot.stop] = [lot.server_index] * (lot.stop - lot.start)
        for _, group in groupby(enumerate(indices), key=lambda pair: (pair[1] - pair[0], servers[pair[1]])):
            run = [index for _, index in group]
            self._queues[servers[run[0]]].appendleft(WorkItem(window.step, servers[run[0]], run[0], run[-1] + 1))
        self.monitor.tell()

    def _wait(self, condition: Callable[[], bool]) -> None:
        """The learner's wait: ends with the condition, a caller's error, or when nothing moves any more."""
        idle_since = None
        while not self.monitor.wait(lambda: condition() or self._failure is not None, timeout_s=POLL_S):
            if self._in_flight:
                idle_since = None
                continue
            idle_since = idle_since or self.clock()
            if self.clock() - idle_since >= self.rules.stuck_after_s:
                waiting = sum(len(queue) for queue in self._queues)
                why = ", as no sync has let them" if self._held else ""
                problem = f"{waiting} calls wait and none has begun for {self.rules.stuck_after_s:g} s{why}"
                raise PrefetchStuck(problem, key="prefetch", remedy="This is a mistake in the program.")
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _call(self, server: int) -> None:
        """A caller's life."""
        problem = f"a thread that called server {server} has ended; its trace stands above"
        error: BaseException | None = PrefetchDied(problem, key=f"server {server}", remedy="Resume the run.")
        try:
            while (lot := self._begin(server)) is not None:
                self._answer(lot)
            error = None
        except FAILURES as caught:
            error = caught
        finally:  # also of a kind that no list knows: the learner must not wait for ever
            if error is not None:
                self._fail(error)

    def _begin(self, server: int) -> WorkItem | None:
        """The next lot, as soon as it may be asked for; None at the end."""
        with self.monitor:
            self.monitor.wait(lambda: self._ends or self._may_begin(server))
            lot = None if self._ends else self._next(server)
            if lot is None:
                return None
            self._queues[lot.server_index].remove(lot)
            lot = lot._replace(server_index=server)
            self._in_flight[lot] = self.clock()
            return lot

    def _next(self, server: int) -> WorkItem | None:
        return next_work_item(self._queues, server, moves=self.rules.pieces_per_server > 1)

    @property
    def _ends(self) -> bool:
        return self._closed or self._failure is not None

    def _may_begin(self, server: int) -> bool:
        lot = None if self._held else self._next(server)
        if lot is None:
            return False
        is_next = lot.step == min(self.windows)
        return is_next or sum(window.num_bytes for window in self.windows.values()) < self.rules.max_bytes

    def _answer(self, lot: WorkItem) -> None:
        window = self.windows[lot.step]
        requests = lot.of(window.requests)
        rollouts = self.backend.generate_on(lot.server_index, requests, self.decoding, start=lot.start)
        with self.monitor:
            began = self._in_flight.pop(lot, self.clock())
            window.put(lot, rollouts)
            self.calls.append(
                FinishedCall(
                    lot=lot,
                    began=began,
                    ended=self.clock(),
                    policy_version=min(rollout.policy_version for rollout in rollouts),
                    num_tokens=sum(len(rollout.response_token_ids) for rollout in rollouts),
                )
            )
            self.monitor.tell()

    def _fail(self, error: BaseException) -> None:
        with self.monitor:
            self._failure = self._failure or error
            self._in_flight.clear()
            self.monitor.tell()
