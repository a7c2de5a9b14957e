"""A server that stays dead, and a sync that broke: the run continues where it may."""

import threading
import time
from dataclasses import replace

import pytest

from conformance.doubles.attached import WEIGHTS, dying, events_of, failing
from conformance.doubles.digits import tokens_of
from conformance.doubles.native_double import Refused
from conformance.doubles.prompts import GREEDY, requests_of
from conformance.doubles.refusals import refused
from conformance.tools.judge import judge
from rollmatch.dialects.watch import ServerDied
from rollmatch.errors import SyncError
from rollmatch.journal import read_journal


@pytest.mark.scenario(
    "server-connection/a-dead-server-s-share-moves",
    clauses=["server-connection/a-call-outlives-a-busy-server#10,11"],
)
def test_a_dead_servers_share_moves_until_it_is_back(attach):
    doubles, backend, source = attach(2, budget_s=0.05)
    backend.members.min_servers = 1
    undisturbed, first = tokens_of(source.generate(requests_of(4), GREEDY)), backend.servers[0]
    infer, look = first.infer, first.path_of

    def dead(*_, **__):
        raise ServerDied("is gone", key=first.base_url)

    first.infer, first.path_of = dead, lambda *_: "/nowhere"
    assert tokens_of(source.generate(requests_of(4), GREEDY)) == undisturbed
    assert (backend.lost, source.policy_version) == ({0}, 1)
    assert [(event["server"], event["num_present"]) for event in events_of(backend, "server_lost")] == [
        (first.base_url, 1)
    ]
    source.fence.sync_if_due(1, lambda: iter(WEIGHTS.items()))
    assert [double.policy_version for double in doubles] == [1, 2]
    first.infer, first.path_of = infer, look
    source.fence.sync_if_due(2, lambda: iter(WEIGHTS.items()))
    assert ([double.policy_version for double in doubles], backend.lost) == ([3, 3], frozenset())
    assert tokens_of(source.generate(requests_of(4), GREEDY)) == undisturbed


def test_a_dead_server_ends_the_run_where_all_are_needed(attach):
    _, backend, source = attach(2, budget_s=0.05)
    dying(backend, times=99)
    with pytest.raises(ServerDied):
        source.generate(requests_of(4), GREEDY)
    assert backend.lost == frozenset()


@pytest.mark.parametrize("is_well_after_s", [0.5, None])
def test_a_sync_that_broke_waits_for_its_servers_within_the_budget(attach, is_well_after_s):
    (double,), backend, source = attach(budget_s=1.0 if is_well_after_s is None else 20.0)
    health, double.health = double.health, refuse
    backend.sender.send = failing(backend.sender.send, SyncError("broke", key="sync", code="transfer-failed"))
    began = time.monotonic()
    if is_well_after_s is None:
        with refused("transfer-failed"):
            source.fence.sync_if_due(1, lambda: iter(WEIGHTS.items()))
        assert 1.0 < time.monotonic() - began < 10
        return
    threading.Timer(is_well_after_s, lambda: setattr(double, "health", health)).start()
    source.fence.sync_if_due(1, lambda: iter(WEIGHTS.items()))
    assert is_well_after_s < time.monotonic() - began < 10
    assert double.policy_version == source.policy_version == 3


def refuse(_):
    raise Refused("starting")


@pytest.mark.scenario(clauses=["server-connection/a-call-outlives-a-busy-server#9"])
@pytest.mark.parametrize(
    ("num_broken", "error"), [(1, None), (2, None), (3, "transfer-failed"), (1, "tensor-mismatch")]
)
def test_a_sync_that_broke_is_repeated_as_a_newer_version(attached, num_broken, error):
    double, backend, source = attached
    code = error or "transfer-failed"
    backend.sender.send = failing(backend.sender.send, *num_broken * [SyncError("broke", key="sync", code=code)])
    if error is None:
        source.fence.sync_if_due(1, lambda: iter(WEIGHTS.items()))
        assert double.policy_version == source.policy_version == 2 + num_broken
        assert [event["version"] for event in events_of(backend, "sync_repeated")] == [3, 4][:num_broken]
        events = read_journal(backend.journal.path)
        assert judge([event for event in events if event["event"] in ("synced", "sync_repeated")][1:]) == []
        begun = [replace(request, policy_version=2) for request in requests_of(3)]  # some server may have taken it
        assert {rollout.policy_version for rollout in source.generate(begun, GREEDY)} == {2}
        return
    with pytest.raises(SyncError) as caught:
        source.fence.sync_if_due(1, lambda: iter(WEIGHTS.items()))
    assert (caught.value.code, len(events_of(backend, "retrying"))) == (error, 2 if code == "transfer-failed" else 0)
