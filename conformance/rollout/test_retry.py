"""A generate call outlives a busy, a silent and a restarted server; what cannot be repaired is an error with a name."""

from itertools import chain, repeat
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conformance.rollout.digits import load_digits
from conformance.rollout.test_vllm_server import GREEDY, STOP, TEMPLATE, requests_of
from conformance.server.instance import free_port
from conformance.weights.native_double import NativeDouble, Refused, serving
from rollmatch.dialects.http import ServerRefused, TransportFailed
from rollmatch.dialects.native.group import Rendezvous
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.dialects.watch import ServerDied
from rollmatch.errors import RollmatchError
from rollmatch.ranks import Ranks
from rollmatch.rollout import retry
from rollmatch.rollout.fence import Fence
from rollmatch.rollout.phase import RolloutSource
from rollmatch.rollout.retry import CallRules, ReplyOutOfRange, ServerRestarted, call_with_retries
from rollmatch.rollout.vllm_server import VllmServerBackend

WEIGHTS = {"a": torch.ones(2), "b": torch.full((3,), 2.0)}


class RetryClock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def refusal(status):
    error = ServerRefused("not now", key="http://server")
    error.status = status
    return error


def failing(*errors):
    """A call that fails with these, one after the other, and then succeeds."""
    left = list(errors)

    def call():
        if left:
            raise left.pop(0)
        return "done"

    return call


def outcome(call, budget_s):
    clock = RetryClock()
    result = call_with_retries(call, budget_s=budget_s, failed=lambda error: None, clock=clock)
    return result, clock.now


def test_pauses_grow_and_the_call_is_repeated():
    errors = refusal(503), refusal(429), TransportFailed("closed")
    assert outcome(failing(*errors), 10.0) == ("done", 0.25 + 0.5 + 1.0)


@pytest.mark.scenario(clauses=["server-connection/a-call-outlives-a-busy-server#2"])
def test_a_dead_server_may_come_back_within_the_budget():
    assert outcome(failing(ServerDied("is gone"), ServerDied("is gone")), 1.0) == ("done", 0.25 + 0.5)
    with pytest.raises(ServerDied):
        outcome(failing(*3 * [ServerDied("is gone")]), 1.0)


def test_only_repetitions_are_told_as_such():
    told, errors = [], [refusal(503), refusal(429), refusal(422)]
    with pytest.raises(ServerRefused):
        call_with_retries(failing(*errors), budget_s=9.0, failed=told.append, repeating=told.append, clock=RetryClock())
    assert told == [errors[0], errors[0], errors[1], errors[1], errors[2]]


@pytest.mark.scenario(clauses=["server-connection/a-call-outlives-a-busy-server#2"])
@pytest.mark.parametrize(("budget_s", "slept_s"), [(0.0, 0.0), (0.25, 0.25), (10.0, 0.25 + 0.5 + 1 + 2 + 4)])
def test_the_budget_bounds_the_time_and_the_last_error_is_raised(budget_s, slept_s):
    clock, tried = RetryClock(), []

    def call():
        tried.append(clock.now)
        raise refusal(503)

    with pytest.raises(ServerRefused):
        call_with_retries(call, budget_s=budget_s, failed=lambda error: None, clock=clock)
    assert clock.now == slept_s <= budget_s
    assert tried[-1] == slept_s


@pytest.mark.scenario(clauses=["server-connection/a-call-outlives-a-busy-server#1"])
@pytest.mark.parametrize(("written", "held"), [((), 60.0), (("0",), 0.0), (("2.5",), 2.5), (("-1",), None)])
def test_the_budget_is_a_number_from_0_in_yaml(written, held):
    key = "custom.extra.rollout_matching.vllm.server.retry_budget_s"
    overrides = [f"{key}={value}" for value in written]
    if held is None:
        with pytest.raises(RollmatchError) as caught:
            load_digits(*overrides)
        assert key in str(caught.value)
        return
    assert load_digits(*overrides).custom.extra.rollout_matching.vllm.server.retry_budget_s == held


def test_a_refusal_for_good_is_not_repeated():
    with pytest.raises(ServerRefused) as caught:
        outcome(failing(refusal(422)), 10.0)
    assert caught.value.status == 422


@pytest.fixture
def attached(monkeypatch):
    """A native double, its backend with a real group, and a source that has synced once."""
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.01)
    double = NativeDouble({name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()})
    front = serving(double)
    (url,) = front.__enter__()
    server = RolloutServer(url, ClientSettings(timeout_s=5))
    server.connect()
    rendezvous = Rendezvous(host="127.0.0.1", port=free_port(), client="learner", timeout_s=5, join_timeout_s=5)
    backend = VllmServerBackend([server], TEMPLATE, Ranks(), sender=NativeSender([server], rendezvous))
    backend.call_rules = CallRules(retry_budget_s=5.0, num_ids=200)
    yield double, backend, source_of(backend)
    backend.close()
    front.__exit__(None, None, None)


def source_of(backend, *, learner_world_size=1):
    journal = SimpleNamespace(write=lambda *_, **__: {})
    fence = Fence(backend, Ranks(), journal)
    fence.sync_if_due(0, lambda: iter(WEIGHTS.items()))
    return RolloutSource(
        template=TEMPLATE,
        fence=fence,
        decoding=GREEDY,
        eval_decoding=GREEDY,
        journal=journal,
        ranks=Ranks(rank=0, learner_world_size=learner_world_size),
        run_seed=1,
    )


def ids_of(rollouts):
    return [rollout.response_token_ids for rollout in rollouts]


@pytest.mark.scenario("server-connection/a-busy-server-costs-a-pause")
def test_a_busy_server_and_a_closed_connection_cost_a_pause(attached):
    _, backend, source = attached
    (server,), infer = backend.servers, backend.servers[0].infer
    undisturbed = ids_of(source.generate(requests_of(3), GREEDY))
    errors = chain([refusal(503), TransportFailed("closed", key=server.base_url)], repeat(None))

    def sometimes(*told, **named):
        if error := next(errors):
            raise error
        return infer(*told, **named)

    server.infer = sometimes
    assert ids_of(source.generate(requests_of(3), GREEDY)) == undisturbed
    assert source.policy_version == 1


def restarting(double):
    """Loses its weights in the middle of the first call."""
    infer, restarts = double.infer, [True]

    def call(body):
        if restarts:
            restarts.pop()
            double.restart({name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()})
            raise Refused("weights-missing")
        return infer(body)

    double.infer = call


@pytest.mark.scenario(
    "server-connection/a-server-is-restarted-in-the-middle-of-a-call",
    clauses=["server-connection/a-call-outlives-a-busy-server#3"],
)
def test_a_server_that_is_restarted_in_a_call_gets_the_weights_and_the_requests_again(attached):
    double, _, source = attached
    undisturbed = ids_of(source.generate(requests_of(3), GREEDY))
    restarting(double)
    rollouts = source.generate(requests_of(3), GREEDY)
    assert ids_of(rollouts) == undisturbed
    assert {name: tensor.tolist() for name, tensor in double.served.items()} == {
        name: tensor.tolist() for name, tensor in WEIGHTS.items()
    }
    assert {rollout.policy_version for rollout in rollouts} == {source.policy_version} == {2}


def dying(backend):
    """A server that dies in the middle of the first call and stands there again, without the weights, after it."""
    (server,), deaths = backend.servers, [True]
    infer = server.infer

    def call(*given, **named):
        if deaths:
            deaths.pop()
            raise ServerDied("is gone", key=server.base_url)
        return infer(*given, **named)

    server.infer = call


def test_a_dead_server_that_came_back_is_not_asked_before_it_has_the_weights(attached):
    double, backend, source = attached
    undisturbed = ids_of(source.generate(requests_of(3), GREEDY))
    dying(backend)
    double.restart({name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()})
    num_asked = len([name for name, _ in double.calls if name == "infer"])
    assert ids_of(source.generate(requests_of(3), GREEDY)) == undisturbed
    assert len([name for name, _ in double.calls if name == "infer"]) == num_asked + 1
    assert source.policy_version == 2


def test_a_server_that_has_died_is_asked_nothing_when_nothing_is_repeated(attached):
    _, backend, source = attached
    backend.call_rules = CallRules()
    dying(backend)
    backend.servers[0].instance = lambda: pytest.fail("asked")
    with pytest.raises(ServerDied):
        source.generate(requests_of(3), GREEDY)


@pytest.mark.scenario(clauses=["server-connection/a-call-outlives-a-busy-server#4"])
def test_with_several_ranks_a_restart_in_a_call_is_an_error(attached):
    double, backend, _ = attached
    source = source_of(backend, learner_world_size=2)
    restarting(double)
    with pytest.raises(ServerRestarted) as caught:
        source.generate(requests_of(3), GREEDY)
    assert (caught.value.code, caught.value.key) == ("server-restarted", backend.servers[0].base_url)


@pytest.mark.scenario(clauses=["server-connection/a-call-outlives-a-busy-server#5"])
@pytest.mark.parametrize(
    ("ids", "told"), [((1,) * 5, "at most 4"), ((1, 200), "200 ids"), ((-1,), "200 ids"), ((199, STOP), None)]
)
def test_replies_that_cannot_be_are_refused(attached, ids, told):
    double, _, source = attached
    infer = double.infer

    def call(body):
        answer = infer(body)
        packed = np.array(ids, dtype="<i4").tobytes()
        return answer | {"responses": [entry | {"response_token_ids": packed} for entry in answer["responses"]]}

    double.infer = call
    if told is None:
        assert ids_of(source.generate(requests_of(1), GREEDY)) == [(199,)]
        return
    with pytest.raises(ReplyOutOfRange) as caught:
        source.generate(requests_of(1), GREEDY)
    assert told in caught.value.problem
