"""A learner and its servers on a virtual clock: real prefetch, fence and order of asking; work takes as recorded."""

from dataclasses import dataclass

from conformance.harness.virtual_time import VirtualTime
from conformance.scenarios.fences import Silent
from conformance.scenarios.prefetching import GREEDY, ScheduledMonitor, requests_of, rollouts_of
from rollmatch.ranks import Ranks
from rollmatch.rollout.ahead import Ahead, Wanted
from rollmatch.rollout.fence import Fence
from rollmatch.rollout.prefetch import Prefetch, PrefetchRules


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Times of real steps in seconds: ``finish_s[step][place]`` from the window's request to a sample's answer,
    ``learn_s[step]`` of learning from a window, ``forward_share`` what of it is forward."""

    num_servers: int
    num_parts: int
    finish_s: tuple[tuple[float, ...], ...]
    learn_s: tuple[float, ...]
    sync_s: float
    forward_share: float

    @property
    def size(self) -> int:
        return len(self.finish_s[0])

    def rollout_s(self, step: int) -> float:
        return max(self.finish_s[step])

    def part_s(self, step: int) -> float:
        return self.learn_s[step] / self.num_parts

    def forward_s(self, step: int) -> float:
        return self.forward_share * self.part_s(step)

    def backward_s(self, step: int) -> float:
        return self.part_s(step) - self.forward_s(step)

    @property
    def early_factor(self) -> float:
        """What a micro-batch with two backward passes costs more than with one."""
        return 2.0 - self.forward_share


class QuietMonitor(ScheduledMonitor):
    """Locks take no time and need no turn."""

    def __enter__(self):
        return None


class TimedServers:
    """A lot is answered when its last sample was, in the recording."""

    def __init__(self, monitor, clock, recorded):
        self.monitor, self.clock, self.recorded = monitor, clock, recorded
        self.num_servers, self.policy_version = recorded.num_servers, 0

    def rest(self):
        pass

    def push(self, weights, *, version):
        self.monitor.act(self.clock.sleep(self.recorded.sync_s))
        self.policy_version = version

    def generate_on(self, server_index, requests, decoding, *, start):
        step = int(requests[0].request_id.split(".")[0])
        finish_s = self.recorded.finish_s[step][start : start + len(requests)]
        version = self.policy_version
        self.monitor.act(self.clock.sleep(max(finish_s)))
        return rollouts_of(requests, version)


class TimedRun:
    """``mode`` as in the configuration; ``begins`` are the times at which steps began, the last is the end."""

    def __init__(self, recorded, mode, *, max_staleness=1, graphs_kept=1):
        self.recorded, self.clock, self.monitor = recorded, VirtualTime(), QuietMonitor()
        self.servers = TimedServers(self.monitor, self.clock, recorded)
        self.num_steps, self.begins, self.lead = len(recorded.learn_s), [], max_staleness
        self.graphs_kept, self.num_kept = graphs_kept, 0
        callers = recorded.num_parts if mode == "stream" else max_staleness
        rules = PrefetchRules(max_windows=self.lead + 1, callers_per_server=callers)
        self.prefetch = Prefetch(self.servers, GREEDY, rules, monitor=self.monitor, clock=lambda: self.clock.now)
        self.fence = Fence(self.servers, Ranks(), Silent())
        self.fence.quiet = self.prefetch.quiet
        self.ahead = Ahead(self.prefetch, max_staleness=max_staleness, lead=self.lead)
        learn = {"off": self._learn, "stream": self._stream, "ahead": self._learn_ahead}[mode]
        self.stuck = self.clock.run(self.monitor.as_ranks(lambda: self._steps(learn)))

    @property
    def step_s(self):
        return [end - begin for begin, end in zip(self.begins, self.begins[1:], strict=False)]

    def _steps(self, learn):
        for step in range(self.num_steps):
            self.begins.append(self.clock.now)
            self.fence.sync_if_due(step, lambda: iter(()))
            learn(step)
        self.begins.append(self.clock.now)
        self.prefetch.close()

    def _sleep(self, seconds):
        self.monitor.act(self.clock.sleep(seconds))

    def _make(self, samples, step):
        return requests_of(step, len(samples))

    def _wanted(self, step):
        return Wanted(step, range(self.recorded.size))

    def _learn(self, step):
        self.ahead.collect([self._wanted(step)], self._make, step_of=self.fence.step_of)
        self._sleep(self.recorded.learn_s[step])

    def _learn_ahead(self, step):
        wanted = [self._wanted(each) for each in range(step, min(step + self.lead + 1, self.num_steps))]
        self.ahead.collect(wanted, self._make, step_of=self.fence.step_of)
        self._sleep(self.recorded.learn_s[step])

    def _stream(self, step):
        recorded, taken = self.recorded, []
        sizes = [recorded.size // recorded.num_parts] * recorded.num_parts
        self.prefetch.ask(step, requests_of(step, recorded.size), sizes)
        for place in range(recorded.num_parts):
            if place == len(taken):
                while self.num_kept and not self.prefetch.has_part(step, taken=taken):
                    self._spend(step)
                taken.append(self.prefetch.next_part(step, taken=taken)[0])
            if not self.prefetch.is_complete(step):
                while self.num_kept >= self.graphs_kept:
                    self._spend(step)
                self._sleep(recorded.forward_s(step))
                self.num_kept += 1
                continue
            taken += [part for part in range(recorded.num_parts) if part not in taken]
            self._sleep(self.num_kept * recorded.backward_s(step) + recorded.part_s(step))
            self.num_kept = 0
        self.prefetch.collect(step, min_version=0)

    def _spend(self, step):
        """Two backward passes of a micro-batch whose divisors are not known."""
        self.num_kept -= 1
        self._sleep(2 * self.recorded.backward_s(step))


def stream_bound(recorded, step, *, early_factor=1.0):
    """Seconds of a step of a learner that never waits while a part is there; ``early_factor`` is what learning from it
    costs before the last one is there. With 1 no on-policy learner can be faster."""
    size = recorded.size // recorded.num_parts
    finish = sorted(max(recorded.finish_s[step][part * size : (part + 1) * size]) for part in range(recorded.num_parts))
    now = 0.0
    for arrival in finish:
        now = max(now, arrival)
        now += recorded.part_s(step) * (early_factor if now < finish[-1] else 1.0)
    return now
