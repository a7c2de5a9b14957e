"""Requests are cut into chunks; an idle server takes what a slow one has not begun; the journal says where."""

import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.native_double import NativeDouble, serving
from conformance.doubles.prefetching import GREEDY, requests_of, until
from conformance.doubles.prompts import TEMPLATE
from conformance.oracle.plan import chunks
from rollmatch.dialects.calls import run_all
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.journal import Journal, read_journal
from rollmatch.ranks import Ranks
from rollmatch.rollout.members import ServerMembers
from rollmatch.rollout.prefetch import Prefetch, PrefetchRules
from rollmatch.rollout.servers import VllmServerBackend
from rollmatch.rollout.work_items import WorkItem, cut_work_items, next_work_item

NUM_REQUESTS, PIECES = 16, 4
LOTS = st.lists(
    st.builds(WorkItem, st.integers(0, 2), st.just(0), st.integers(0, 5), st.integers(6, 9)), min_size=0, max_size=4
)


@pytest.mark.scenario(clauses=["request-distribution/late-work-moves-only-where-it-may#4"])
@given(st.lists(LOTS, min_size=1, max_size=3))
def test_a_server_without_own_work_of_the_earliest_step_takes_the_end_of_the_longest_queue(drawn):
    queues = [deque(item._replace(server_index=place) for item in sorted(items)) for place, items in enumerate(drawn)]
    waiting = [item for queue in queues for item in queue]
    earliest = min((item.step for item in waiting), default=None)
    for server, own in enumerate(queues):
        assert next_work_item(queues, server, moves=False) == (own[0] if own else None)
        item = next_work_item(queues, server, moves=True)
        assert (item is None) == (not waiting)
        if item is None:
            continue
        assert item.step == earliest, "what is learnt next comes first"
        mine = [each for each in own if each.step == earliest]
        assert item == mine[0] if mine else item.server_index != server
        if not mine:
            longest = max(sum(each.stop - each.start for each in q if each.step == earliest) for q in queues)
            its = [each for each in queues[item.server_index] if each.step == earliest]
            assert item == its[-1]
            assert sum(each.stop - each.start for each in its) == longest


@pytest.mark.scenario(clauses=["request-distribution/late-work-moves-only-where-it-may#3"])
@given(num_requests=st.integers(1, 25), num_servers=st.integers(1, 4), pieces=st.integers(1, 6))
def test_work_items_keep_servers_and_cut_chunks_evenly(num_requests, num_servers, pieces):
    whole = cut_work_items(0, num_requests, num_servers, pieces=1, first=0)
    items = cut_work_items(0, num_requests, num_servers, pieces=pieces, first=0)
    assert [i for item in items for i in range(item.start, item.stop)] == list(range(num_requests))
    server_of = {i: item.server_index for item in whole for i in range(item.start, item.stop)}
    for item in items:
        assert {server_of[i] for i in range(item.start, item.stop)} == {item.server_index}
    sizes = [item.stop - item.start for item in cut_work_items(0, num_requests, 1, pieces=pieces, first=0)]
    assert len(sizes) == min(pieces, num_requests)
    assert max(sizes) - min(sizes) <= 1


class SlowWorkServer(NativeDouble):
    """Answers its calls when ``gate`` opens."""

    gate = None

    def infer(self, body):
        assert self.gate is None or self.gate.wait(30)
        return super().infer(body)


@pytest.fixture
def make_run(tmp_path):
    """Two real HTTP servers, the first of which answers nothing while ``gate`` is closed; and calls beside learning."""
    opened = []

    def make(*, pieces, gate=None):
        doubles = [SlowWorkServer({"a": torch.zeros(1)}, policy_version=1) for _ in range(2)]
        doubles[0].gate = gate
        front = serving(*doubles)
        servers = [RolloutServer(url, ClientSettings(timeout_s=5)) for url in front.__enter__()]
        opened.append(lambda: front.__exit__(None, None, None))
        run_all(server.connect for server in servers)
        path = tmp_path / f"{len(opened)}.jsonl"
        backend = VllmServerBackend(servers, TEMPLATE, Ranks(), sender=None, journal=Journal(path))
        backend.push([], version=1)
        rules = PrefetchRules(max_windows=1, callers_per_server=pieces // 2 or 1, pieces_per_server=pieces)
        prefetch = Prefetch(backend, GREEDY, rules)
        opened.append(prefetch.close)
        with prefetch.quiet():
            pass
        prefetch.submit(0, requests_of(0, NUM_REQUESTS))
        return SimpleNamespace(prefetch=prefetch, urls=[server.base_url for server in servers], journal=path)

    yield make
    for close in reversed(opened):
        close()


def seeds_by_server(run):
    """By the journal; a seed stands for one request of the run."""
    seeds = {url: [] for url in run.urls}
    for event in read_journal(run.journal):
        if event["event"] == "called":
            seeds[event["server"]] += [seed for sent in event["sent"] for seed in sent["seeds"]]
    return list(seeds.values())


@pytest.mark.scenario(
    "request-distribution/an-idle-server-takes-what-a-slow-one-has-not-begun",
    clauses=["request-distribution/late-work-moves-only-where-it-may#4,5,6,7"],
)
def test_what_a_slow_server_has_not_begun_is_written_by_the_idle_one(make_run):
    gate = threading.Event()
    run, usual = make_run(pieces=PIECES, gate=gate), make_run(pieces=1)
    under_way = NUM_REQUESTS // 2 * (PIECES // 2) // PIECES
    until(lambda: len(seeds_by_server(run)[1]) == NUM_REQUESTS - under_way)
    assert not run.prefetch.windows[0].is_complete, "what the slow server has begun stays there"
    gate.set()
    (rollouts, num_again), (expected, _) = (each.prefetch.collect(0, min_version=1) for each in (run, usual))
    assert rollouts == expected, "the same answers in the same order"
    assert num_again == 0
    slow, idle = seeds_by_server(run)
    seeds = [request.seed for request in requests_of(0, NUM_REQUESTS)]
    assert sorted(slow) == seeds[:under_way]
    assert sorted(slow + idle) == seeds, "each request is made once"
    assert [sorted(each) for each in seeds_by_server(usual)] == [seeds[: NUM_REQUESTS // 2], seeds[NUM_REQUESTS // 2 :]]


def test_the_timeline_has_the_calls_of_each_server(make_run):
    gate = threading.Event()
    run = make_run(pieces=PIECES, gate=gate)
    until(lambda: len(seeds_by_server(run)[1]) == NUM_REQUESTS - 4)
    gate.set()
    run.prefetch.collect(0, min_version=1)
    calls = [call.as_list() for call in run.prefetch.take_calls()]
    served = [[], []]
    for server, _, _, step, start, stop in calls:
        assert step == 0
        served[server] += range(start, stop)
    assert [sorted(each) for each in served] == [[0, 1, 2, 3], list(range(4, NUM_REQUESTS))]


@pytest.mark.scenario(
    "request-distribution/a-chunk-that-may-not-move-stays",
    clauses=["request-distribution/late-work-moves-only-where-it-may#2"],
)
def test_a_share_that_is_not_cut_stays_with_its_server(make_run):
    gate = threading.Event()
    run = make_run(pieces=1, gate=gate)
    until(lambda: len(seeds_by_server(run)[1]) == NUM_REQUESTS // 2)
    time.sleep(0.2)
    assert len(seeds_by_server(run)[1]) == NUM_REQUESTS // 2
    gate.set()
    assert len(run.prefetch.collect(0, min_version=1)[0]) == NUM_REQUESTS


@given(st.data(), st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
def test_each_rank_cuts_its_requests_for_the_servers_that_are_left(data, num_requests, num_servers, num_ranks):
    """Whoever is lost for a while or gone for good; what a lost server had is cut again, from where it began."""
    some = st.sets(st.integers(0, num_servers - 1), max_size=num_servers - 1)
    lost, start = data.draw(some, "lost"), data.draw(st.integers(0, 9), "start")
    gone = data.draw(st.sets(st.sampled_from(sorted(lost)))) if lost else set()
    for rank in range(num_ranks):
        members = ServerMembers([None] * num_servers, Ranks(rank=rank, learner_world_size=num_ranks))
        members.min_servers = 1
        for server in gone:
            members.remove(server)
        members.agree_on(lost)
        present = [server for server in range(num_servers) if server not in lost]
        expected = [
            (present[place], start + first, start + last)
            for first, last, place in chunks(num_requests, len(present), rank, num_ranks)
        ]
        assert members.cut(num_requests, start=start) == expected
