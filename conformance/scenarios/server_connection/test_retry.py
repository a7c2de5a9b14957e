"""A generate call outlives a busy, a silent and a restarted server; what cannot be repaired is an error with a name."""

import dataclasses

import numpy as np
import pytest
import torch

from conformance.doubles.attached import WEIGHTS, dying, events_of, failing, restarting
from conformance.doubles.digits import load_digits, tokens_of
from conformance.doubles.native_double import Refused
from conformance.doubles.prompts import GREEDY, STOP, requests_of
from conformance.doubles.refusals import refused
from rollmatch.dialects.http import CallTimeout, ServerRefused, TransportFailed
from rollmatch.dialects.session import InferTimeout, ServerUnreachable
from rollmatch.dialects.watch import CallStalled, ServerDied
from rollmatch.errors import RollmatchError
from rollmatch.rollout.retry import (
    CallRules,
    Pause,
    ServerRestarted,
    call_with_retries,
    is_transient,
    is_transient_in_sync,
)
from rollmatch.weights.digest import DigestMismatch
from rollmatch.weights.plan import TensorMismatch


class RetryClock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        assert self.now < 3600, "a call is repeated for ever"


def refusal(status, code="server-refused"):
    error = ServerRefused("not now", key="http://server")
    error.status, error.code = status, code
    return error


def outcome(budget_s, *errors):
    """What a call that fails with these returns in the end, and how long that took."""
    clock, call = RetryClock(), failing(lambda: "done", *errors)
    result = call_with_retries(call, budget_s=budget_s, failed=lambda error, pause: None, clock=clock)
    return result, clock.now


def test_pauses_grow_to_a_limit_and_the_call_is_repeated():
    kinds = TransportFailed, CallTimeout, InferTimeout, CallStalled, ServerUnreachable
    errors = refusal(503), refusal(429), *(kind("closed") for kind in kinds)
    assert outcome(60.0, *errors) == ("done", 0.25 + 0.5 + 1.0 + 2.0 + 4.0 + 8.0 + 8.0)


@pytest.mark.scenario(clauses=["server-connection/a-call-outlives-a-busy-server#2"])
def test_a_dead_server_may_come_back_within_the_budget():
    assert outcome(1.0, *2 * [ServerDied("is gone")]) == ("done", 0.25 + 0.5)
    with pytest.raises(ServerDied):
        outcome(1.0, *3 * [ServerDied("is gone")])


def test_only_repetitions_are_reported_as_such():
    noted, errors = [], [refusal(503), refusal(429), refusal(422)]
    with pytest.raises(ServerRefused):
        call_with_retries(
            failing(None, *errors),
            budget_s=9.0,
            failed=lambda error, pause: noted.append((error, pause)),
            repeating=noted.append,
            clock=RetryClock(),
        )
    pauses = Pause(2, 0.25, 9.0), Pause(3, 0.5, 8.75)
    assert noted == [(errors[0], pauses[0]), errors[0], (errors[1], pauses[1]), errors[1], (errors[2], None)]


@pytest.mark.scenario(clauses=["server-connection/a-call-outlives-a-busy-server#2"])
@pytest.mark.parametrize(("budget_s", "slept_s"), [(0.0, 0.0), (0.25, 0.25), (10.0, 0.25 + 0.5 + 1 + 2 + 4)])
def test_the_budget_bounds_the_time_and_the_last_error_is_raised(budget_s, slept_s):
    clock, tried = RetryClock(), []

    def call():
        tried.append(clock.now)
        raise refusal(503)

    with pytest.raises(ServerRefused):
        call_with_retries(call, budget_s=budget_s, failed=lambda error, pause: None, clock=clock)
    assert clock.now == slept_s <= budget_s
    assert tried[-1] == slept_s


@pytest.mark.scenario(
    clauses=[
        "server-connection/a-call-outlives-a-busy-server#1",
        "server-connection/a-dead-server-is-noticed-without-a-timeout#4",
    ]
)
@pytest.mark.parametrize(
    ("name", "written", "held"),
    [
        *(("retry_budget_s", *pair) for pair in (((), 60.0), (("0",), 0.0), (("2.5",), 2.5), (("-1",), KeyError))),
        *(("stall_timeout_s", *pair) for pair in (((), 300.0), (("null",), None), (("0",), KeyError))),
        *(("infer_timeout_s", *pair) for pair in (((), None), (("2.5",), 2.5))),
        *(("min_servers", *pair) for pair in (((), None), (("1",), 1), (("0",), KeyError), (("2",), KeyError))),
    ],
)
def test_limits_of_retries_are_numbers_with_defaults(name, written, held):
    key = f"custom.extra.rollout_matching.vllm.server.{name}"
    url = ("base_url=http://127.0.0.1:8000", "group_port=51216")
    overrides = [f"{key}={value}" for value in written] + [f"{key.removesuffix(name)}{pair}" for pair in url]
    overrides.append("custom.extra.rollout_matching.vllm.mode=server")
    if held is KeyError:
        with pytest.raises(RollmatchError) as caught:
            load_digits(*overrides)
        assert key in str(caught.value)
        return
    assert getattr(load_digits(*overrides).custom.extra.rollout_matching.vllm.server, name) == held


def test_a_refusal_for_good_is_not_repeated():
    with pytest.raises(ServerRefused) as caught:
        outcome(10.0, refusal(422))
    assert caught.value.status == 422


@pytest.mark.parametrize(
    ("error", "call", "sync"),
    [
        *(
            (refusal(status), is_busy, is_busy)
            for status, is_busy in ((429, True), (503, True), (422, False), (500, False))
        ),
        (refusal(409, "update-in-progress"), True, True),
        *((TransportFailed("closed"), True, True), (ServerRestarted("another"), False, False)),
        *((DigestMismatch("a"), False, True), (TensorMismatch("a"), False, False)),
    ],
)
def test_what_may_succeed_later_is_repeated_in_calls_and_in_syncs(error, call, sync):
    assert (is_transient(error), is_transient_in_sync(error)) == (call, sync)


@pytest.mark.scenario(
    "server-connection/a-busy-server-costs-a-pause", clauses=["server-connection/a-call-outlives-a-busy-server#8"]
)
def test_a_busy_server_and_a_closed_connection_cost_a_pause_and_are_announced(attached, caplog):
    double, backend, source = attached
    (server,) = backend.servers
    undisturbed = tokens_of(source.generate(requests_of(3), GREEDY))
    double.infer = failing(double.infer, Refused("server-busy", status=503))
    server.infer = failing(server.infer, TransportFailed("closed", key=server.base_url))
    assert tokens_of(source.generate(requests_of(3), GREEDY)) == undisturbed
    assert source.policy_version == 1
    noted = events_of(backend, "retrying")
    assert [(event["server"], event["attempt"], event["wait_s"]) for event in noted] == [
        (server.base_url, 2, 0.01),
        (server.base_url, 3, 0.02),
    ]
    assert all(4 < event["left_s"] <= 5 for event in noted)
    warned = [record for record in caplog.records if record.name == "rollmatch.rollout"]
    assert [record.levelname for record in warned if "attempt" in record.getMessage()] == 2 * ["WARNING"]


@pytest.mark.scenario(clauses=["server-connection/a-call-outlives-a-busy-server#13"])
@pytest.mark.parametrize("code", ["call-too-large", "body-too-large"])
def test_a_call_that_is_too_large_is_made_in_halves(attached, code):
    double, backend, source = attached
    infer, undisturbed = double.infer, tokens_of(source.generate(requests_of(5), GREEDY))
    most = [2, 0]

    def call(body):
        if len(body["requests"]) > most[0]:
            raise Refused(code)
        return infer(body)

    double.infer = call
    assert tokens_of(source.generate(requests_of(5), GREEDY)) == undisturbed
    assert events_of(backend, "called")[-1]["num_splits"] == 2
    most.pop(0)
    with refused(code):
        source.generate(requests_of(1), GREEDY)


@pytest.mark.scenario(
    "server-connection/a-server-is-restarted-in-the-middle-of-a-call",
    clauses=["server-connection/a-call-outlives-a-busy-server#3"],
)
def test_a_server_that_is_restarted_in_a_call_gets_the_weights_and_the_requests_again(attached):
    double, _, source = attached
    undisturbed = tokens_of(source.generate(requests_of(3), GREEDY))
    restarting(double)
    rollouts = source.generate(requests_of(3), GREEDY)
    assert tokens_of(rollouts) == undisturbed
    assert {name: tensor.tolist() for name, tensor in double.served.items()} == {
        name: tensor.tolist() for name, tensor in WEIGHTS.items()
    }
    assert {rollout.policy_version for rollout in rollouts} == {source.policy_version} == {2}
    restarting(double, 3)
    assert tokens_of(source.generate(requests_of(3), GREEDY)) == undisturbed
    restarting(double, 4)
    with pytest.raises(ServerRestarted):
        source.generate(requests_of(3), GREEDY)


def test_a_dead_server_that_came_back_is_not_asked_before_it_has_the_weights(attached):
    double, backend, source = attached
    undisturbed = tokens_of(source.generate(requests_of(3), GREEDY))
    dying(backend)
    double.restart({name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()})
    num_asked = len([name for name, _ in double.calls if name == "infer"])
    assert tokens_of(source.generate(requests_of(3), GREEDY)) == undisturbed
    assert len([name for name, _ in double.calls if name == "infer"]) == num_asked + 1
    assert source.policy_version == 2


@pytest.mark.scenario(
    "server-connection/a-server-that-names-no-process-was-out-of-reach",
    clauses=["server-connection/a-call-outlives-a-busy-server#12"],
)
@pytest.mark.parametrize("error", [TransportFailed("closed", key="url"), ServerDied("is gone", key="url")])
def test_a_server_without_a_name_that_was_out_of_reach_gets_the_weights_first(attached, error):
    double, backend, source = attached
    undisturbed = tokens_of(source.generate(requests_of(3), GREEDY))
    (server,) = backend.servers
    backend.members.instances, server.instance = {0: ""}, lambda: ""
    server.infer, begun = failing(server.infer, error), len(double.calls)
    assert tokens_of(source.generate(requests_of(3), GREEDY)) == undisturbed
    asked = [name for name, _ in double.calls[begun:]]
    assert asked.index("communicator") < asked.index("sync") < asked.index("infer")
    assert (source.policy_version, backend.members.restarted) == (2, set())


def test_a_pause_ends_when_a_server_that_was_gone_is_well_again(attach, monkeypatch):
    monkeypatch.setattr("rollmatch.rollout.retry.FIRST_WAIT_S", 600.0)
    _, backend, source = attach(budget_s=3600.0)
    looks = iter([False, True])
    backend.members.is_well = lambda server_index: next(looks)
    dying(backend)
    assert len(source.generate(requests_of(3), GREEDY)) == 3
    assert list(looks) == []


def test_a_server_that_has_died_is_asked_nothing_when_nothing_is_repeated(attached):
    _, backend, source = attached
    backend.calls.rules = CallRules()
    dying(backend)
    backend.servers[0].instance = lambda: pytest.fail("asked")
    with pytest.raises(ServerDied):
        source.generate(requests_of(3), GREEDY)


@pytest.mark.scenario(clauses=["server-connection/a-call-outlives-a-busy-server#5"])
@pytest.mark.parametrize(("begun", "named"), [(None, 2), (1, 1), (7, 2)])
def test_what_continues_a_response_keeps_its_version_if_the_weights_are_the_same(attached, begun, named):
    double, _, source = attached
    restarting(double)
    requests = [dataclasses.replace(request, policy_version=begun) for request in requests_of(3)]
    assert {rollout.policy_version for rollout in source.generate(requests, GREEDY)} == {named}
    assert source.policy_version == 2


@pytest.mark.scenario(clauses=["server-connection/a-call-outlives-a-busy-server#5"])
def test_what_continues_a_response_with_later_weights_has_their_version(attached):
    _, _, source = attached
    source.sync(1, lambda: iter(WEIGHTS.items()))
    requests = [dataclasses.replace(request, policy_version=1) for request in requests_of(3)]
    assert {rollout.policy_version for rollout in source.generate(requests, GREEDY)} == {2}


@pytest.mark.scenario(clauses=["server-connection/a-call-outlives-a-busy-server#6"])
@pytest.mark.parametrize(
    ("ids", "problem"), [((1,) * 5, "at most 4"), ((1, 200), "200 ids"), ((-1,), "200 ids"), ((199, STOP), None)]
)
def test_replies_that_cannot_be_are_refused(attached, ids, problem):
    double, _, source = attached
    infer = double.infer

    def call(body):
        answer = infer(body)
        packed = np.array(ids, dtype="<i4").tobytes()
        return answer | {"responses": [entry | {"response_token_ids": packed} for entry in answer["responses"]]}

    double.infer = call
    if problem is None:
        assert tokens_of(source.generate(requests_of(1), GREEDY)) == [(199,)]
        return
    with refused("reply-out-of-range") as caught:
        source.generate(requests_of(1), GREEDY)
    assert problem in caught.value.problem
