"""A learner, the threads that call its servers, and the servers, as a world for the scheduler: the real prefetch and
the real fence, whose every lock, wait, call and push is an action."""

import threading
from contextlib import nullcontext
from dataclasses import dataclass, field

from conformance.doubles.records import make_reply, make_request
from conformance.harness.schedule import as_rank, do, when
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding
from rollmatch.rollout.fence import Fence
from rollmatch.rollout.prefetch import Prefetch, PrefetchRules

GREEDY = Decoding(max_new_tokens=4)


def requests_of(step, num_requests):
    """Requests of one window; sample ids count on over the windows."""
    first = step * num_requests
    return [make_request(first + place, request_id=f"{step}.0.{place}") for place in range(num_requests)]


def rollouts_of(requests, version):
    """Answers, whose only token is the sample's id."""
    return [make_reply(request, (request.sample.sample_id,), version=version) for request in requests]


class NoJournal:
    """A journal that nobody reads."""

    def write(self, event, **fields):
        return fields


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
class ScheduledServers:
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
                self.prefetch.submit(asked, requests_of(asked, self.size), (self.size,))
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
