"""Requests go to servers in chunks and come back in order; only rank 0 sends weights; a restarted server is noticed."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from conformance.doubles.native_double import NativeDouble, Refused, serving
from conformance.doubles.prompts import GREEDY, TEMPLATE, requests_of
from conformance.doubles.refusals import refused
from rollmatch.dialects.calls import run_all
from rollmatch.dialects.http import ServerRefused
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.errors import SyncError
from rollmatch.ranks import Ranks
from rollmatch.rollout.servers import VllmServerBackend


class Sender:
    """Takes weights without a network; ``broken`` is raised after the first tensor."""

    def __init__(self, doubles, broken=None):
        self.doubles, self.broken, self.took, self.instances = doubles, broken, [], None

    def send(self, weights, *, version):
        for pair in weights:
            self.took.append(pair)
            if self.broken:
                raise self.broken
        self._commit(version)

    def send_adapter(self, adapter, *, version):
        self.took.append(adapter)
        self._commit(version)
        if self.broken:
            raise self.broken

    def _commit(self, version):
        for double in self.doubles:
            double.policy_version = version

    def close(self):
        self.took.append("closed")


class Watched:
    """Weights that note how far they were iterated."""

    def __init__(self, *, is_sharded):
        self.is_sharded, self.passed = is_sharded, []

    def __iter__(self):
        for name in "abc":
            self.passed.append(name)
            yield name, torch.zeros(1)


@pytest.fixture
def doubles():
    return [NativeDouble({"a": torch.zeros(1)}) for _ in range(3)]


@pytest.fixture
def make_backend(doubles):
    fronts = []

    def make(*, rank=0, broken=None, synced=True):
        front = serving(*doubles)
        fronts.append(front)
        servers = [RolloutServer(url, ClientSettings(timeout_s=5)) for url in front.__enter__()]
        run_all(server.connect for server in servers)
        sender = Sender(doubles, broken) if rank == 0 else None
        backend = VllmServerBackend(servers, TEMPLATE, Ranks(rank=rank, learner_world_size=2), sender=sender)
        if synced:
            backend.push([("a", torch.zeros(1))], version=1)
            for double in doubles:
                double.policy_version, double.calls = 1, []
        return backend

    yield make
    for front in fronts:
        front.__exit__(None, None, None)


def asked(double):
    return [[r["request_id"] for r in body["requests"]] for name, body in double.calls if name == "infer"]


@pytest.mark.scenario(
    "request-distribution/four-requests-and-three-servers",
    "request-distribution/seven-requests-and-three-servers",
    "request-distribution/one-request-and-three-servers",
    clauses=["request-distribution/requests-are-cut-into-contiguous-chunks#1,2,3"],
)
def test_every_server_gets_its_chunk_and_an_empty_chunk_no_call(make_backend, doubles):
    backend = make_backend()
    for num_requests, sizes in ((7, [3, 3, 1]), (4, [2, 2, 0]), (1, [1, 0, 0])):
        for double in doubles:
            double.calls = []
        requests = requests_of(num_requests)
        backend.generate(requests, GREEDY)
        ids, expected = [request.request_id for request in requests], []
        for place, size in enumerate(sizes):
            first = sum(sizes[:place])
            expected.append([ids[first : first + size]] if size else [])
        assert [asked(double) for double in doubles] == expected


@pytest.mark.scenario(
    "request-distribution/the-same-list-twice",
    "request-distribution/nothing-to-ask-for",
    clauses=[
        "request-distribution/requests-are-cut-into-contiguous-chunks#4",
        "request-distribution/no-requests-mean-no-calls#1,2",
    ],
)
def test_the_same_list_twice_goes_the_same_ways_and_no_requests_nowhere(make_backend, doubles):
    backend, requests = make_backend(), requests_of(10)
    assert backend.generate([], GREEDY) == []
    assert [double.calls for double in doubles] == [[], [], []]
    for _ in range(2):
        backend.generate(requests, GREEDY)
    assert [len(calls) for calls in map(asked, doubles)] == [2, 2, 2]
    assert all(first == second for first, second in map(asked, doubles))


def test_a_server_that_has_left_is_not_lost_on_the_word_of_a_rank_that_has_not_heard(make_backend):
    """It would be readmitted as soon as it is well."""
    members = make_backend().members
    members.min_servers = 1
    members.remove(0)
    members.agree_on({0, 2})
    assert (members.lost, members.present, members.find_returned()) == ({2}, (1,), {2})


def test_episodes_of_a_server_that_has_left_are_spread_over_the_others(make_backend, doubles):
    backend, requests = make_backend(), requests_of(6)
    turns = backend.open_turns(6, GREEDY)
    backend.members.remove(0)
    for place, request in enumerate(requests):
        turns.write(place, request)
    assert [len(asked(double)) for double in doubles] == [0, 3, 3]


@pytest.mark.scenario(clauses=["request-distribution/requests-are-cut-into-contiguous-chunks#5"])
def test_all_servers_are_asked_at_the_same_time(make_backend, doubles):
    gate, answer = threading.Barrier(3), NativeDouble.infer
    for double in doubles:
        double.infer = lambda body, double=double: (gate.wait(10), answer(double, body))[1]
    assert len(make_backend().generate(requests_of(6), GREEDY)) == 6


@pytest.mark.scenario(
    "request-distribution/the-last-server-answers-first",
    clauses=["request-distribution/rollouts-come-back-in-the-order-of-the-requests#1"],
)
def test_the_last_server_may_answer_first(make_backend, doubles):
    answer, requests = NativeDouble.infer, requests_of(7)
    doubles[0].infer = lambda body: (time.sleep(2), answer(doubles[0], body))[1]
    rollouts = make_backend().generate(requests, GREEDY)
    assert [rollout.request_id for rollout in rollouts] == [request.request_id for request in requests]
    assert [rollout.prompt_token_ids for rollout in rollouts] == [request.prompt_token_ids for request in requests]
    assert [rollout.response_token_ids for rollout in rollouts] == [(100 + i, 5) for i in range(7)], (
        "trimmed at the stop"
    )
    assert {rollout.policy_version for rollout in rollouts} == {1}


def test_a_limit_of_one_request_ends_its_response_whatever_the_server_writes(make_backend):
    """As servers do whose calls have one limit: that of the longest response."""
    short, long = requests_of(2)
    rollouts = make_backend().generate([replace(short, max_new_tokens=1), long], GREEDY)
    ends = [(one.response_token_ids, one.finish_reason) for one in rollouts]
    assert ends == [((100,), "length"), ((101, 5), "stop")]


def test_a_response_that_another_token_has_ended_was_not_stopped(make_backend):
    """vLLM says stop for every end-of-sequence token of a model; only the stop token's responses get it as a target."""
    requests = [
        replace(one, prompt_token_ids=one.prompt_token_ids[:end])
        for one, end in zip(requests_of(2), (4, 2), strict=True)
    ]
    rollouts = make_backend().generate(requests, GREEDY)
    assert [(one.response_token_ids, one.finish_reason) for one in rollouts] == [
        ((100, 5), "stop"),
        ((101, 5), "length"),
    ]


@pytest.mark.scenario(
    "request-distribution/one-of-three-servers-refuses",
    clauses=["request-distribution/one-failing-server-fails-the-step#1,2,3"],
)
def test_a_server_that_refuses_fails_the_whole_and_names_its_part(make_backend, doubles):
    def refuse(body):
        raise Refused("prompt-too-long", item=1)

    def wait(body):
        gate.wait(4)
        ended.set()

    gate, ended = threading.Event(), threading.Event()
    doubles[1].infer, doubles[2].infer = refuse, wait
    backend = make_backend()
    with pytest.raises(ServerRefused) as caught:
        backend.generate(requests_of(6), GREEDY)
    assert not ended.is_set(), "nobody waits for the others"
    gate.set()
    error = caught.value
    assert (error.code, error.key) == ("prompt-too-long", backend.servers[1].base_url)
    assert "requests 2 and 3" in error.problem
    assert "x.jsonl:4" in error.remedy


def test_no_rollout_before_the_first_push_and_versions_count_on(make_backend, doubles):
    doubles[1].policy_version = 7
    backend = make_backend(synced=False)
    assert backend.policy_version == 7
    for double in doubles:
        double.policy_version = 0
    with refused("rollout-before-sync"):
        backend.generate(requests_of(1), GREEDY)
    assert asked(doubles[0]) == []
    backend.push([("a", torch.zeros(1))], version=1)
    assert len(backend.generate(requests_of(1), GREEDY)) == 1


def test_a_rollout_of_another_version_is_refused(make_backend, doubles):
    backend = make_backend()
    doubles[2].policy_version = 5
    with refused("policy-version-mismatch", backend.servers[2].base_url):
        backend.generate(requests_of(3), GREEDY)
    assert len(backend.generate(requests_of(2), GREEDY)) == 2


def test_a_server_that_was_started_again_or_refuses_is_not_current(make_backend, doubles):
    def refuse(_body):
        raise Refused("engine-dead")

    backend = make_backend()
    assert backend.is_current()
    doubles[1].restart({"a": torch.zeros(1)})
    assert not backend.is_current()
    backend.push([("a", torch.zeros(1))], version=2)
    assert backend.is_current()
    doubles[1].health = refuse
    assert not backend.is_current()
    assert [backend.members.instance_of(place) for place in (0, 1)] == [doubles[0].instance, None]


@pytest.mark.scenario(
    "learner-ranks/spread-weights-arrive-whole", clauses=["learner-ranks/only-the-main-process-sends-weights#4"]
)
@pytest.mark.parametrize(("rank", "is_sharded", "passed"), [(0, True, 3), (0, False, 3), (1, True, 3), (1, False, 0)])
def test_every_rank_takes_part_in_gathers_and_no_other_iterates(make_backend, rank, is_sharded, passed):
    weights = Watched(is_sharded=is_sharded)
    backend = make_backend(rank=rank, synced=False)
    backend.push(weights, version=3)
    assert len(weights.passed) == passed
    assert backend.policy_version == 3


@pytest.mark.parametrize(("is_sharded", "passed"), [(True, 3), (False, 1)])
def test_a_failed_push_still_ends_the_gathers_and_leaves_nothing_to_generate_with(make_backend, is_sharded, passed):
    backend, weights = make_backend(), Watched(is_sharded=is_sharded)
    backend.sender.broken = SyncError("no")
    with pytest.raises(SyncError):
        backend.push(weights, version=2)
    assert len(weights.passed) == passed
    assert not backend.is_current()
    with refused("rollout-before-sync"):
        backend.generate(requests_of(1), GREEDY)
    with pytest.raises(SyncError):
        backend.push_adapter("adapter", version=4)
    assert backend.policy_version == 4, "an adapter that failed half-way counts"
    assert not backend.is_current()


def test_a_sync_that_names_who_took_it_needs_no_other_health_call(make_backend, doubles):
    backend = make_backend(synced=False)
    backend.sender.instances = tuple(double.instance for double in doubles)
    for double in doubles:
        double.calls = []
    backend.push([("a", torch.zeros(1))], version=1)
    assert [double.calls for double in doubles] == [[], [], []]
    assert backend.is_current()
    doubles[1].restart({"a": torch.zeros(1)})
    assert not backend.is_current()
