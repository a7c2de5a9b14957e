"""What is requested, and what is not, after a server was restarted or lost, and after a sync that failed."""

import threading
import time

import pytest

from conformance.doubles.prefetching import GREEDY, Servers, ids_of, opened, requests_of, until
from conformance.judge.servers.bounded import in_thread
from rollmatch.errors import RolloutError
from rollmatch.rollout import prefetch as module
from rollmatch.rollout.members import ServerLost
from rollmatch.rollout.monitor import ThreadMonitor
from rollmatch.rollout.prefetch import Prefetch, PrefetchRules
from rollmatch.rollout.retry import ServerRestarted


class OneRestarted(Servers):
    """Server 0 turns out to have lost its weights once another one writes, too, which answers when the gate opens."""

    def __init__(self, num_servers):
        super().__init__(num_servers)
        self.begun, self.num_restarts = threading.Event(), 0

    def generate_on(self, server_index, requests, decoding, *, start):
        if server_index == 0 and self.version == 1:
            assert self.begun.wait(10)
            self.num_restarts += 1
            raise ServerRestarted("has another instance", key="server 0")
        self.begun.set()
        return super().generate_on(server_index, requests, decoding, start=start)


class OneLost(Servers):
    """Server 0 is lost by the first call that it gets."""

    def generate_on(self, server_index, requests, decoding, *, start):
        if server_index == 0:
            self.lost = (0,)
            raise ServerLost("does not answer", key="server 0")
        return super().generate_on(server_index, requests, decoding, start=start)


class RestartedAtFirst(Servers):
    """Its first call finds out that the server was restarted; ``begun`` are the first requests of all calls."""

    def __init__(self, num_servers):
        super().__init__(num_servers)
        self.begun = []

    def generate_on(self, server_index, requests, decoding, *, start):
        self.begun.append(start)
        if len(self.begun) == 1:
            raise ServerRestarted("has another instance", key="server 0")
        return super().generate_on(server_index, requests, decoding, start=start)


class WatchedMonitor(ThreadMonitor):
    """Says when the learner waits; callers wait without a time."""

    def __init__(self):
        super().__init__()
        self.learner_waits = threading.Event()

    def wait(self, condition, *, timeout_s=None):
        if timeout_s is not None:
            self.learner_waits.set()  # still inside: nobody can come between this and the wait
        return super().wait(condition, timeout_s=timeout_s)


@pytest.mark.scenario(clauses=["prefetch/a-stuck-prefetcher-is-an-error#1"])
def test_a_failure_wakes_the_learner_and_lets_the_other_callers_end(monkeypatch):
    """Nobody looks again of himself here."""
    monkeypatch.setattr(module, "POLL_S", 3600.0)
    servers, monitor, ended = Servers(2), WatchedMonitor(), []
    monitor.start = lambda work, *, name: ended.append(in_thread(work))
    servers.gate.clear()
    servers.broken = {1: RolloutError("no", key="x")}
    prefetch = Prefetch(servers, GREEDY, PrefetchRules(max_windows=1, callers_per_server=2), monitor=monitor)
    with prefetch.quiet():
        monitor.learner_waits.clear()
    prefetch.submit(0, requests_of(0, 1))
    collecting = in_thread(prefetch.collect, 0, min_version=1)
    assert monitor.learner_waits.wait(30)
    servers.gate.set()
    with pytest.raises(RolloutError, match="no"):
        collecting.result(timeout=30)
    assert [caller.result(timeout=30) for caller in ended] == [None] * 4


def test_what_a_restart_has_interrupted_is_requested_before_all_else():
    servers = RestartedAtFirst(1)
    with opened(servers, callers_per_server=1, pieces_per_server=2) as prefetch:
        for step in range(2):
            prefetch.submit(step, requests_of(step, 4))
        with pytest.raises(ServerRestarted):
            prefetch.collect(0, min_version=1)
        with prefetch.quiet():
            pass
        for step in range(2):
            prefetch.collect(step, min_version=1)
    assert servers.begun == [0, 0, 2, 0, 2]


@pytest.mark.scenario(clauses=["server-connection/a-call-outlives-a-busy-server#10"])
def test_the_work_of_a_lost_server_is_done_by_the_others():
    """Also what waited for it while it was lost, in this window and the next."""
    with opened(OneLost(2), callers_per_server=1, pieces_per_server=2) as prefetch:
        for step in range(2):
            prefetch.submit(step, requests_of(step, 8))
        for step in range(2):
            assert ids_of(prefetch.collect(step, min_version=1)[0]) == list(range(step * 8, (step + 1) * 8))


@pytest.mark.scenario(clauses=["prefetch/nothing-is-requested-before-the-weights-are-right#2"])
def test_the_sync_after_a_restart_waits_for_the_calls_of_other_servers():
    servers = OneRestarted(2)
    servers.gate.clear()
    with opened(servers, callers_per_server=1) as prefetch:
        prefetch.submit(0, requests_of(0, 4))
        with pytest.raises(ServerRestarted):
            prefetch.collect(0, min_version=1)
        until(lambda: servers.under_way == 1)
        threading.Timer(0.1, servers.gate.set).start()
        with prefetch.quiet():
            assert servers.under_way == 0
            servers.version = 2
        assert [one.policy_version for one in prefetch.collect(0, min_version=1)[0]] == [2, 2, 1, 1]


def test_no_call_begins_after_a_restart_until_a_sync_has_ended():
    servers = OneRestarted(2)
    with opened(servers, callers_per_server=1, pieces_per_server=2) as prefetch:
        prefetch.submit(0, requests_of(0, 8))
        with pytest.raises(ServerRestarted):
            prefetch.collect(0, min_version=1)
        until(lambda: not any(prefetch.spans_of([], now=0.0)))
        asked = len(servers.asked)
        time.sleep(0.1)
        assert (len(servers.asked), servers.num_restarts) == (asked, 1)
        with prefetch.quiet():
            servers.version = 2
        assert ids_of(prefetch.collect(0, min_version=1)[0]) == list(range(8))


@pytest.mark.scenario(clauses=["prefetch/nothing-is-requested-before-the-weights-are-right#1"])
def test_nothing_is_requested_after_a_sync_that_failed_until_one_has_succeeded():
    servers = Servers()
    with opened(servers, is_open=False) as prefetch:
        prefetch.submit(0, requests_of(0, 4))
        for _ in range(2):
            with pytest.raises(RolloutError, match="half way"), prefetch.quiet():
                raise RolloutError("the weights arrived half way", key="sync")
            time.sleep(0.1)
            assert servers.asked == []
        with prefetch.quiet():
            servers.version = 2
        assert [one.policy_version for one in prefetch.collect(0, min_version=2)[0]] == [2] * 4
