"""Windows come back whole and in order whatever the threads do; what is wrong with a thread reaches the learner."""

import threading
import time

import pytest

from conformance.doubles.prefetching import (
    GREEDY,
    QuickMonitor,
    Servers,
    ids_of,
    opened,
    requests_of,
    rollouts_of,
    until,
)
from conformance.doubles.refusals import refused
from conformance.judge.servers.bounded import in_thread
from rollmatch.errors import RolloutError
from rollmatch.rollout.overlap import Ahead
from rollmatch.rollout.prefetch import Prefetch, PrefetchRules
from rollmatch.rollout.retry import ServerRestarted


def test_nothing_is_requested_while_it_is_held():
    servers = Servers()
    with opened(servers, is_open=False) as prefetch:
        prefetch.submit(0, requests_of(0, 4))
        time.sleep(0.1)
        assert servers.asked == []
        with prefetch.quiet():
            time.sleep(0.05)
            assert servers.asked == []
        assert len(prefetch.collect(0, min_version=1)[0]) == 4


@pytest.mark.parametrize(
    ("old", "again"),
    [({0}, [(0, [0])]), ({1, 2}, [(0, [1, 2])]), ({2, 3}, [(0, [2]), (1, [3])]), ({0, 5}, [(0, [0]), (1, [5])])],
)
def test_what_has_become_too_old_is_requested_again_and_nothing_else(old, again):
    servers = Servers()
    with opened(servers) as prefetch:
        prefetch.submit(0, requests_of(0, 6))
        prefetch.wait_for(0)
        window = prefetch.windows[0]
        for place in old:
            window.rollouts[place] = rollouts_of([window.requests[place]], 0)[0]
        servers.asked = []
        rollouts, num_dropped = prefetch.collect(0, min_version=1)
        assert ids_of(rollouts) == list(range(6))
        assert {rollout.policy_version for rollout in rollouts} == {1}
        assert (sorted(servers.asked), num_dropped) == (again, len(old))


def test_a_sync_waits_for_the_window_that_is_learnt_next_alone():
    """Where its server was restarted, the rest of it is generated after the sync."""
    servers = Servers(1)
    with opened(servers) as prefetch:
        overlap = Ahead(None, prefetch, max_staleness=2, lead=2)
        overlap.wait_for_next()
        prefetch.submit(0, requests_of(0, 2))
        prefetch.wait_for(0)
        servers.gate.clear()
        prefetch.submit(1, requests_of(1, 2))
        overlap.wait_for_next()
        assert not prefetch.windows[1].is_complete
        prefetch.forget(0)
        servers.broken = {2: ServerRestarted("another process", key="http://s:1")}
        servers.gate.set()
        overlap.wait_for_next()
        assert not prefetch.windows[1].is_complete


def test_a_server_that_continues_with_old_weights_is_an_error():
    servers = Servers()
    with opened(servers) as prefetch:
        prefetch.submit(3, requests_of(3, 2))
        with refused("rollout-too-old", "3"):
            prefetch.collect(3, min_version=2)
        assert len(servers.asked) == 4
    servers = Servers()
    servers.version = 2
    with opened(servers) as prefetch:
        prefetch.submit(3, requests_of(3, 2))
        assert len(prefetch.collect(3, min_version=2)[0]) == 2


@pytest.mark.scenario(clauses=["prefetch/a-stuck-prefetcher-is-an-error#1"])
@pytest.mark.parametrize("error", [RolloutError("no", key="x"), KeyError("choices"), OSError("reset")])
def test_an_error_of_a_caller_reaches_the_learner_wherever_it_is(error):
    servers = Servers(1)
    servers.broken = {2: error}
    with opened(servers, callers_per_server=1) as prefetch:
        prefetch.submit(0, requests_of(0, 1))
        prefetch.collect(0, min_version=1)
        prefetch.submit(1, requests_of(1, 1))
        with pytest.raises(type(error)) as caught:
            in_thread(prefetch.collect, 1, min_version=1).result(timeout=10)
        assert caught.value is error
        for word in (prefetch.check, prefetch.quiet().__enter__):
            with pytest.raises(type(error)):
                word()


class Unheard(Exception):
    """A kind of error that no list names."""


def test_a_caller_that_dies_of_something_unheard_of_is_an_error_of_the_run(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    servers = Servers(1)
    servers.broken = {1: Unheard()}
    with opened(servers) as prefetch:
        prefetch.submit(0, requests_of(0, 1))
        with refused("prefetch-died", "server 0"):
            prefetch.collect(0, min_version=1)


class Sleepy(Prefetch):
    """Its callers find nothing to do."""

    def _may_begin(self, server):
        return False


def test_calls_that_nobody_begins_are_an_error_after_a_stated_time():
    servers = Servers(1)
    rules = PrefetchRules(max_windows=2, callers_per_server=1, stuck_after_s=0.2)
    prefetch = Sleepy(servers, GREEDY, rules, monitor=QuickMonitor())
    with prefetch.quiet():
        pass
    prefetch.submit(0, requests_of(0, 1))
    began = time.monotonic()
    with refused("prefetch-stuck", "prefetch"):
        prefetch.collect(0, min_version=1)
    assert 0.2 <= time.monotonic() - began < 5
    prefetch.close()


def test_a_learner_that_waits_before_the_first_sync_is_an_error():
    with opened(Servers(), is_open=False, monitor=QuickMonitor(), stuck_after_s=0.1) as prefetch:
        prefetch.submit(0, requests_of(0, 2))
        with refused("prefetch-stuck") as caught:
            prefetch.collect(0, min_version=1)
        assert "no sync has let them" in caught.value.problem
        with prefetch.quiet():
            pass
        assert ids_of(prefetch.collect(0, min_version=1)[0]) == [0, 1]


def test_a_call_that_takes_longer_than_that_is_none():
    servers = Servers(1)
    servers.pause_s = 0.4
    with opened(servers, monitor=QuickMonitor(), stuck_after_s=0.1) as prefetch:
        prefetch.submit(0, requests_of(0, 1))
        assert ids_of(prefetch.collect(0, min_version=1)[0]) == [0]


def test_every_call_is_recorded_once_with_its_time_server_and_version():
    servers = Servers(2)
    servers.pause_s = 0.02
    with opened(servers) as prefetch:
        prefetch.submit(0, requests_of(0, 3))
        prefetch.collect(0, min_version=1)
        calls = sorted(prefetch.take_calls(), key=lambda call: call.item)
        assert [(call.item.server_index, call.item.start, call.item.stop) for call in calls] == [(0, 0, 2), (1, 2, 3)]
        assert [(call.policy_version, call.num_tokens) for call in calls] == [(1, 2), (1, 1)]
        assert all(0.02 <= call.ended - call.began < 5 for call in calls)
        assert prefetch.spans_of(calls, now=0.0) == [[(call.began, call.ended)] for call in calls]
        assert prefetch.take_calls() == []


def test_a_server_that_joins_gets_calls_after_the_sync_and_one_that_left_gets_none():
    servers = Servers(2)
    with opened(servers, callers_per_server=1) as prefetch:
        prefetch.submit(0, requests_of(0, 4))
        prefetch.collect(0, min_version=0)
        prefetch.forget(0)
        servers.gate.clear()
        prefetch.submit(1, requests_of(1, 4))
        until(lambda: servers.under_way == 2)
        servers.gate.set()
        with prefetch.quiet():
            servers.num_servers, servers.lost, servers.asked[:] = 3, {0}, []
        prefetch.submit(2, requests_of(2, 4))
        assert ids_of(prefetch.collect(1, min_version=0)[0]) == [4, 5, 6, 7]
        assert ids_of(prefetch.collect(2, min_version=0)[0]) == [8, 9, 10, 11]
    assert sorted(servers.asked) == [(1, [8, 9]), (2, [10, 11])]
