"""Rollouts that are made while the learner learns: who may call a server when, and what the learner waits for.

The learner (main thread) requests windows, collects them in order and holds all calls while weights move; callers
(threads, some per server) take work items off their server's queue, or off another one's where work is stolen,
one call at a time. States of a caller::

    waiting --(an item, not held, buffer not full)--> calling --(reply)--> waiting
                                              \\--(server restarted or lost)--> the item waits again
                                              \\--(error)--> the learner raises it at its next word with us

and of the whole: held (before the first sync, and while weights move) or open. ``hold`` lets no call begin and waits
until none is under way: a call ends under the weights under which it began. After a restart no call begins until a sync
has ended; the learner's waits raise ``ServerRestarted`` and may be repeated after it. Nothing else waits while it holds
the lock, no caller ever waits for the learner except to begin a call, so the two cannot wait for each other.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby

from rollmatch.errors import FAILURES, RolloutError
from rollmatch.records import Rollout, RolloutRequest
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.members import ServerLost
from rollmatch.rollout.monitor import Monitor, ThreadMonitor
from rollmatch.rollout.open_groups import Group
from rollmatch.rollout.prefetch_rules import PrefetchRules, ServerBackend
from rollmatch.rollout.retry import ServerRestarted
from rollmatch.rollout.window import FinishedCall, PendingWindow
from rollmatch.rollout.work_items import WorkItem, next_work_item

Arrived = Callable[[int, Sequence[RolloutRequest], Sequence[Rollout]], None]
"""(step of the window, requests, their rollouts): some of them, in order."""
Choose = Callable[[Mapping[int, Collection[int]]], list[Group] | None]
"""Complete groups of each window -> those that a step takes; None: it waits for more."""
POLL_S = 1.0
"""How often a learner that waits looks whether anything still moves."""


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
        self.arrived: Arrived = lambda step, requests, rollouts: None
        """Gets what a call brought, in the caller's thread; waits for nothing."""
        self.windows: dict[int, PendingWindow] = {}
        self.calls: list[FinishedCall] = []
        self._queues: list[deque[WorkItem]] = []
        self._in_flight: dict[WorkItem, float] = {}
        self._held, self._closed = True, False
        self._due = -1
        """The step that waits for groups; windows up to it may always be asked for."""
        self._failure: BaseException | None = None
        self._restarted: ServerRestarted | None = None
        """A server has lost its weights; until the next sync has ended."""
        self._start_callers()

    def submit(self, step: int, requests: Sequence[RolloutRequest], *, groups: Collection[int] | None = None) -> None:
        """Put a window, or these groups of it, behind those that are on their way. Errors: ``prefetch-overfull``."""
        with self.monitor:
            if len(self.windows) >= self.rules.max_windows:
                problem = f"step {step} is requested while steps {sorted(self.windows)} are on their way"
                raise RolloutError(problem, code="prefetch-overfull", key=str(step), remedy="This is a bug; report it.")
            self.windows[step] = PendingWindow(step, tuple(requests))
            for item in self.rules.cut(step, len(requests), self._present()):
                if groups is None or item.start // (item.stop - item.start) in groups:
                    self._queues[item.server_index].append(item)
            self.monitor.notify()

    def wait_for_groups(self, step: int, choose: Choose) -> list[Group]:
        """What ``choose`` returns of the complete groups, as soon as that is not None; ``step`` is to learn from them.

        They stay until ``take``. Errors: as ``collect``.
        """
        chosen: list[Group] = []

        def is_chosen() -> bool:
            size = self.rules.group_size or 1
            found = choose({window: pending.complete_groups(size) for window, pending in self.windows.items()})
            chosen[:] = found or ()
            return found is not None

        with self.monitor:
            self._due = step
            self.monitor.notify()
            self._wait(is_chosen)
            return list(chosen)

    def take(self, groups: Sequence[Group], *, left: Collection[int]) -> tuple[list[RolloutRequest], list[Rollout]]:
        """Requests and rollouts of complete groups, which are forgotten, as are windows that are not in ``left``."""
        size, requests, rollouts = self.rules.group_size or 1, list[RolloutRequest](), list[Rollout]()
        with self.monitor:
            for window, place in groups:
                pending, part = self.windows[window], slice(place * size, (place + 1) * size)
                requests += pending.requests[part]
                rollouts += filter(None, pending.rollouts[part])
                pending.rollouts[part] = [None] * size
            self.windows = {window: pending for window, pending in self.windows.items() if window in left}
            self.monitor.notify()
        return requests, rollouts

    def collect(self, step: int, *, min_version: int) -> tuple[list[Rollout], int]:
        """All rollouts of a window, in order, none older than ``min_version``; and how many were requested again.

        The window stays until ``forget``. Errors: those of the calls, ``ServerRestarted``,
        ``prefetch-died``, ``prefetch-stuck``, ``rollout-too-old``.
        """
        with self.monitor:
            window = self.windows[step]
            self._wait(lambda: window.is_complete)
            while old := window.drop_older(min_version):
                if window.num_again:
                    problem = f"step {step} got rollouts of versions before {min_version} again"
                    raise RolloutError(
                        problem,
                        code="rollout-too-old",
                        key=str(step),
                        remedy="Is another learner writing to the server?",
                    )
                window.num_again = len(old)
                self._ask_again(window, old)
                self._wait(lambda: window.is_complete)
            return window.taken(), window.num_again

    def forget(self, step: int) -> None:
        """Make room for another window."""
        with self.monitor:
            del self.windows[step]
            self.monitor.notify()

    def wait_for(self, step: int) -> None:
        """Until every call of a window was answered; at once where it was not requested. Errors: as ``collect``."""
        with self.monitor:
            window = self.windows.get(step)
            self._wait(lambda: window is None or window.is_complete)

    def check(self) -> None:
        """Raise what a caller has failed with; called between two micro-batches."""
        with self.monitor:
            self._raise_failure()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No call begins inside, but those under way continue."""
        with self.monitor:
            self._raise_failure()
            self._held = True
        yield
        self._release()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No call is under way inside, and none begins; callers stay held if the inside fails. Errors: ``collect``."""
        with self.monitor:
            self._held = True
            self._wait(lambda: not self._in_flight)
        yield
        self._release()

    def take_calls(self) -> list[FinishedCall]:
        """Calls that were answered since the last time."""
        with self.monitor:
            calls, self.calls = self.calls, []
            return calls

    def spans_of(self, calls: Sequence[FinishedCall], *, now: float) -> list[list[tuple[float, float]]]:
        """When each server was writing: in ``calls``, and in those under way."""
        spans: list[list[tuple[float, float]]] = [[] for _ in range(self.backend.num_servers)]
        for call in calls:
            spans[call.item.server_index].append((call.began, call.ended))
        with self.monitor:
            for item, began in self._in_flight.items():
                spans[item.server_index].append((began, now))
        return spans

    def close(self) -> None:
        """Let callers end after their call; waits for none."""
        with self.monitor:
            self._closed = True
            self.monitor.notify()

    def _release(self) -> None:
        """Let calls begin, also of servers that have joined."""
        with self.monitor:
            self._start_callers()
            self._held, self._restarted = False, None
            self.monitor.notify()

    def _start_callers(self) -> None:
        """Of the servers that have none yet."""
        for server in range(len(self._queues), self.backend.num_servers):
            self._queues.append(deque())
            for _ in range(self.rules.callers_per_server):
                self.monitor.start(partial(self._call, server), name=f"rollout-caller-{server}")

    def _present(self) -> list[int]:
        """The servers that take calls; all, where none does now."""
        everyone, lost = range(self.backend.num_servers), self.backend.lost
        return [server for server in everyone if server not in lost] or list(everyone)

    def _ask_again(self, window: PendingWindow, indices: Sequence[int]) -> None:
        """One item per run of neighbours of one server, before everything else."""
        servers = [0] * len(window.requests)
        for item in self.rules.cut(window.step, len(window.requests), self._present()):
            servers[item.start : item.stop] = [item.server_index] * (item.stop - item.start)
        for _, group in groupby(enumerate(indices), key=lambda pair: (pair[1] - pair[0], servers[pair[1]])):
            run = [index for _, index in group]
            self._queues[servers[run[0]]].appendleft(WorkItem(window.step, servers[run[0]], run[0], run[-1] + 1))
        self.monitor.notify()

    def _wait(self, condition: Callable[[], bool]) -> None:
        """The learner's wait: ends with the condition, a caller's error, or when nothing moves any more.

        A restart ends it, too, except in ``quiet``, before the sync that the restart calls for.
        """
        idle_since = None

        def ends() -> bool:
            return condition() or self._failure is not None or (self._restarted is not None and not self._held)

        while not self.monitor.wait(ends, timeout_s=POLL_S):
            if self._in_flight:
                idle_since = None
                continue
            idle_since = idle_since or self.clock()
            if self.clock() - idle_since >= self.rules.stuck_after_s:
                waiting = sum(len(queue) for queue in self._queues)
                why = ", as no sync has let them" if self._held else ""
                problem = f"{waiting} calls wait and none has begun for {self.rules.stuck_after_s:g} s{why}"
                raise RolloutError(problem, code="prefetch-stuck", key="prefetch", remedy="This is a bug; report it.")
        self._raise_failure()
        if self._restarted is not None and not self._held and not condition():
            raise self._restarted

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _call(self, server: int) -> None:
        """A caller's life."""
        problem = f"a thread that called server {server} has ended; its trace stands above"
        error: BaseException | None = RolloutError(
            problem, code="prefetch-died", key=f"server {server}", remedy="Resume the run."
        )
        try:
            while (item := self._begin(server)) is not None:
                try:
                    self._answer(item)
                except (ServerRestarted, ServerLost) as lost:
                    self._put_back(item, lost)
            error = None
        except FAILURES as caught:
            error = caught
        finally:  # also of a kind that no list knows: the learner must not wait for ever
            if error is not None:
                self._fail(error)

    def _begin(self, server: int) -> WorkItem | None:
        """The next item, as soon as it may be requested; None at the end."""
        with self.monitor:
            self.monitor.wait(lambda: self._ends or self._may_begin(server))
            item = None if self._ends else self._next(server)
            if item is None:
                return None
            self._queues[item.server_index].remove(item)
            item = item._replace(server_index=server)
            self._in_flight[item] = self.clock()
            return item

    def _next(self, server: int) -> WorkItem | None:
        lost = self.backend.lost
        if server in lost:
            return None
        left = next((self._queues[index][0] for index in lost if self._queues[index]), None)
        own = next_work_item(self._queues, server, moves=self.rules.moves)
        return own if left is None or (own is not None and own.step <= left.step) else left

    def _put_back(self, item: WorkItem, error: RolloutError) -> None:
        """Let a item wait again, before all others of its server."""
        with self.monitor:
            del self._in_flight[item]
            self._queues[item.server_index].appendleft(item)
            if isinstance(error, ServerRestarted):
                self._restarted = error
            self.monitor.notify()

    @property
    def _ends(self) -> bool:
        return self._closed or self._failure is not None

    def _may_begin(self, server: int) -> bool:
        item = None if self._held or self._restarted is not None else self._next(server)
        if item is None:
            return False
        is_next = item.step <= max(min(self.windows), self._due)
        return is_next or sum(window.num_bytes for window in self.windows.values()) < self.rules.max_bytes

    def _answer(self, item: WorkItem) -> None:
        window = self.windows[item.step]
        requests = item.of(window.requests)
        rollouts = self.backend.generate_on(item.server_index, requests, self.decoding, start=item.start)
        self.arrived(item.step, requests, rollouts)
        with self.monitor:
            began = self._in_flight.pop(item)
            window.put(item, rollouts)
            self.calls.append(
                FinishedCall(
                    item=item,
                    began=began,
                    ended=self.clock(),
                    policy_version=min(rollout.policy_version for rollout in rollouts),
                    num_tokens=sum(rollout.num_tokens for rollout in rollouts),
                )
            )
            self.monitor.notify()

    def _fail(self, error: BaseException) -> None:
        with self.monitor:
            self._failure = self._failure or error
            self.monitor.notify()
