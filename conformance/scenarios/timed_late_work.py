"""Servers that are not equally fast, on a virtual clock: the real prefetch, answers that take as long as recorded."""

from dataclasses import dataclass
from functools import cache

from conformance.harness.virtual_time import VirtualTime
from conformance.scenarios.prefetching import GREEDY, requests_of, rollouts_of
from conformance.scenarios.timed_overlap import QuietMonitor
from rollmatch.rollout.prefetch import Prefetch, PrefetchRules


@dataclass(frozen=True, kw_only=True)
class Work:
    """A window and who is to write it. An engine writes ``num_seats`` answers at once, each as slowly in any company;
    what comes later waits for a seat, first come first served."""

    answer_s: tuple[float, ...]
    slowdowns: tuple[float, ...]
    """Of each server."""
    num_seats: int

    @property
    def bound_s(self) -> float:
        """No assignment is done earlier: every seat is taken to the end, or the longest answer is the last."""
        speed = self.num_seats * sum(1 / slowdown for slowdown in self.slowdowns)
        return max(sum(self.answer_s) / speed, max(self.answer_s) * min(self.slowdowns))


class SeatedServers:
    """Knows when each seat is free again, so that a call's end is known when it begins."""

    def __init__(self, monitor, clock, work):
        self.monitor, self.clock, self.work = monitor, clock, work
        self.num_servers = len(work.slowdowns)
        self.free_s = [[0.0] * work.num_seats for _ in work.slowdowns]

    def generate_on(self, server_index, requests, decoding, *, start):
        ends = [self._write(server_index, self.work.answer_s[start + place]) for place in range(len(requests))]
        self.monitor.act(self.clock.sleep(max(ends) - self.clock.now))
        return rollouts_of(requests, 0)

    def _write(self, server_index, answer_s):
        free_s = self.free_s[server_index]
        seat = free_s.index(min(free_s))
        free_s[seat] = max(self.clock.now, free_s[seat]) + self.work.slowdowns[server_index] * answer_s
        return free_s[seat]


@cache
def rollout_s(work, *, pieces, together):
    """From asking for the window to its last answer; a virtual clock tells the same each time."""
    clock, monitor, size, ends = VirtualTime(), QuietMonitor(), len(work.answer_s), []
    rules = PrefetchRules(max_windows=1, callers_per_server=together, pieces_per_server=pieces)
    prefetch = Prefetch(SeatedServers(monitor, clock, work), GREEDY, rules, monitor=monitor, clock=lambda: clock.now)

    def learn():
        with prefetch.quiet():
            prefetch.ask(0, requests_of(0, size), (size,))
        prefetch.collect(0, min_version=0)
        ends.append(clock.now)
        prefetch.close()

    assert clock.run(monitor.as_ranks(learn)) == []
    return ends[0]
