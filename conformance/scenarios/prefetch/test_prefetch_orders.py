"""Every order of a learner, the threads that call its servers, and the servers: the real prefetch and the real fence.

Their every lock, wait, call and push is an action for the scheduler.
"""

import threading
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest

from conformance.doubles.prefetching import GREEDY, requests_of, rollouts_of
from conformance.doubles.ranks import NoJournal
from conformance.tools.schedule import as_rank, do, explore, when
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import RolloutBackend
from rollmatch.rollout.fence import Fence
from rollmatch.rollout.prefetch import Prefetch, PrefetchRules


class ScheduledMonitor:
    """A monitor whose every entry and wait is an action of the thread that makes it."""

    def __init__(self):
        self.works = []
        self.here = threading.local()

    def __enter__(self):
        self.act(do("enter"))

    def __exit__(self, *_):
        return None

    def act(self, action):
        return self.here.act(action)

    def wait(self, condition, *, timeout_s=None):
        if not condition():
            self.act(when("wait", condition))
        return True

    def notify(self):
        pass

    def start(self, work, *, name):
        self.works.append(work)

    def as_ranks(self, *works):
        return [as_rank(lambda act, work=work: self._run(work, act)) for work in (*works, *self.works)]

    def _run(self, work, act):
        self.here.act = act
        work()


@dataclass
class ScheduledServers(RolloutBackend):
    """A call takes two actions, a push two; ``wrong`` is what must not happen."""

    monitor: ScheduledMonitor
    num_servers: int = 1
    lost: tuple = ()
    policy_version: int = 0
    pushing: bool = False
    writing: list = field(default_factory=list)
    """The versions under which calls began that are under way."""
    wrong: str = ""
    asked: list = field(default_factory=list)
    """Sample ids, by the order of the calls."""

    def generate(self, requests, decoding):
        raise NotImplementedError

    def push(self, weights, *, version):
        self.monitor.act(do("push begins"))
        self.pushing = True
        self.monitor.act(do("push ends"))
        self.pushing, self.policy_version = False, version

    def generate_on(self, server_index, requests, decoding, *, start):
        self.monitor.act(do("first token"))
        first = self.policy_version
        self.asked += [request.sample.sample_id for request in requests]
        self.writing.append(first)
        self._judge(first)
        self.monitor.act(do("last token"))
        self.writing.remove(first)
        self._judge(first)
        return rollouts_of(requests, first)

    def _judge(self, first):
        if self.pushing:
            self.wrong = "a token is written while weights are pushed"
        elif first == 0:
            self.wrong = "a request comes before the first sync"
        elif first != self.policy_version:
            self.wrong = f"a response has tokens of versions {first} and {self.policy_version}"


@dataclass
class AheadWorld:
    """``max_staleness`` windows are asked for ahead; the learner learns ``num_steps`` steps."""

    num_steps: int = 2
    num_servers: int = 1
    callers: int = 1
    size: int = 1
    max_staleness: int = 1
    pieces: int = 1
    fenced: bool = True
    kind: type = Prefetch
    consumed: list = field(default_factory=list)

    def __post_init__(self):
        self.monitor = ScheduledMonitor()
        self.servers = ScheduledServers(self.monitor, num_servers=self.num_servers)
        rules = PrefetchRules(
            max_windows=self.max_staleness + 1, callers_per_server=self.callers, pieces_per_server=self.pieces
        )
        self.prefetch = self.kind(self.servers, GREEDY, rules, monitor=self.monitor)
        self.fence = Fence(self.servers, Ranks(), NoJournal())
        self.fence.quiet = self.prefetch.quiet if self.fenced else nullcontext
        self.ranks = self.monitor.as_ranks(self._learn)

    def _learn(self):
        asked = 0
        for step in range(self.num_steps):
            self.fence.sync_if_due(step, lambda: iter(()))
            while asked < min(self.num_steps, step + self.max_staleness + 1):
                self.prefetch.submit(asked, requests_of(asked, self.size))
                asked += 1
            rollouts, _ = self.prefetch.collect(step, min_version=self.servers.policy_version - self.max_staleness)
            self.prefetch.forget(step)
            self.monitor.act(do("learn"))
            self.consumed += [token for rollout in rollouts for token in rollout.response_token_ids]
        self.prefetch.close()

    def state(self):
        prefetch, servers = self.prefetch, self.servers
        waiting = tuple(
            (step, tuple(r and r.policy_version for r in w.rollouts)) for step, w in prefetch.windows.items()
        )
        inside = (prefetch._held, prefetch._closed, tuple(map(tuple, prefetch._queues)), tuple(prefetch._in_flight))
        engine = (servers.policy_version, servers.pushing, tuple(servers.writing), servers.wrong)
        return waiting, inside, engine, tuple(self.consumed)

    def problem(self):
        asked = self.servers.asked
        if len(asked) != len(set(asked)):
            return f"asked for {asked}"
        in_order = self.consumed == list(range(len(self.consumed)))
        return self.servers.wrong or ("" if in_order else f"consumed {self.consumed}")


class Hasty(Prefetch):
    """Weights move while calls are under way."""

    def _wait(self, condition):
        if not self._held:
            super()._wait(condition)


class Guarded(Prefetch):
    """The guard covers all of a caller's work, and the call inside waits for it once more."""

    def _answer(self, item):
        with self.monitor:
            self.monitor.wait(lambda: not self._held)
        super()._answer(item)


@pytest.mark.scenario(
    "prefetch/every-interleaving-of-prefetch-and-sync-ends",
    clauses=["prefetch/nothing-is-requested-before-the-weights-are-right#2,3"],
)
@pytest.mark.parametrize(
    "shape", [{}, {"num_steps": 3}, {"num_steps": 3, "max_staleness": 2}, {"num_steps": 1, "callers": 2, "size": 2}]
)
def test_every_order_ends_and_no_response_has_two_versions(shape):
    found = explore(lambda: AheadWorld(**shape))
    assert [(trouble.problem, trouble.order) for trouble in found.troubles] == []
    assert found.num_orders > 100


class ForgetfulPrefetch(Prefetch):
    """What moves to another server also stays where it was."""

    def _begin(self, server):
        before = [deque(queue) for queue in self._queues]
        item = super()._begin(server)
        if item is not None and all(item not in queue for queue in before):
            self._queues[1 - server].append(item._replace(server_index=1 - server))
        return item


LATE = {"num_steps": 1, "num_servers": 2, "size": 2, "pieces": 2}


def test_late_work_moves_in_every_order_and_is_requested_once():
    found = explore(lambda: AheadWorld(**LATE))
    assert [(trouble.problem, trouble.order) for trouble in found.troubles] == []
    assert found.num_orders > 100
    doubled = explore(
        lambda: AheadWorld(**LATE, kind=ForgetfulPrefetch), until=lambda problem: problem.startswith("asked for")
    )
    assert doubled.troubles[-1].problem.startswith("asked for"), "the scheduler sees what is asked for twice"


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Hasty, "a response has tokens of versions 1 and 2"),
        (Hasty, "a token is written while weights are pushed"),
        (Guarded, "deadlock: rank 0 at wait, rank 1 at wait"),
    ],
)
def test_the_scheduler_sees_a_prefetch_that_is_wrong(kind, problem):
    assert explore(lambda: AheadWorld(kind=kind), until=problem.__eq__).troubles[-1].problem == problem
