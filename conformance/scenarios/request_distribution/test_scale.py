"""A run of 1,000 servers and 256 ranks on paper: what the simulation says, and that it simulates what the code does."""

import doctest
import sys
import threading
from contextlib import ExitStack

import pytest
import torch

from benchmarks.scale import fan_out
from benchmarks.scale.fan_out import LEARNER, WAYS
from benchmarks.scale.records import EVERY_STEP, event_bytes, records_of
from benchmarks.scale.requests import Fleet, load_of, spread, together
from benchmarks.scale.table import PAGE, slowdown, tables
from conformance.doubles.hosts import two_hosts
from conformance.doubles.instance import free_port
from conformance.doubles.learner_side import connected, rendezvous
from conformance.doubles.native_double import NativeDouble, serving
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.ranks import Ranks
from rollmatch.rollout.members import ServerMembers
from rollmatch.rollout.work_items import Chunk
from rollmatch.weights.gloo import GlooGroup
from rollmatch.weights.group_address import GroupAddress

SHORT = 1.6e9
"""Bytes of a tenth of the weights: the longer a transfer, the less a chain's length counts."""


def test_the_examples_hold():
    assert doctest.testmod(fan_out).failed == 0


def test_a_chain_reaches_64_servers_in_at_most_1_3_times_the_time_to_4(capsys):
    found = {way: slowdown(way, 64, num_bytes=SHORT) for way in WAYS}
    with capsys.disabled():
        ways = ", ".join(f"{way} {times:.2f}" for way, times in found.items())
        sys.stdout.write(f"\nsync to 64 servers / to 4: {ways}\n")
    assert found["chain"] <= 1.3
    assert found["binomial tree"] > 2, "gloo's learner sends a whole copy for every doubling"
    assert found["unicast"] == pytest.approx(16, rel=0.05)


@pytest.mark.parametrize("num_servers", [1, 4, 7, 64])
@pytest.mark.parametrize("way", WAYS)
def test_every_server_gets_every_bucket_once_from_one_that_has_it(way, num_servers):
    held = {LEARNER}
    for sender, receiver in WAYS[way](num_servers):
        assert sender in held
        assert receiver not in held
        held.add(receiver)
    assert held == set(range(num_servers + 1))


@pytest.mark.scenario("request-distribution/two-ranks-and-four-servers")
def test_two_ranks_begin_with_different_servers():
    ranks = [Ranks(rank=rank, learner_world_size=2) for rank in (0, 1)]
    chunks = [ServerMembers(["a", "b", "c", "d"], each).cut(2) for each in ranks]
    assert chunks == [[Chunk(0, 0, 1), Chunk(1, 1, 2)], [Chunk(2, 0, 1), Chunk(3, 1, 2)]]


def test_ranks_that_begin_with_different_servers_leave_none_idle(capsys):
    fleet = Fleet(num_servers=1000, num_ranks=256, requests_per_rank=256)
    now, crowded = load_of(fleet, spread), load_of(fleet, together)
    with capsys.disabled():
        shares = f"{now.efficiency:.2f}, if all ranks began with server 0 {crowded.efficiency:.2f}"
        sys.stdout.write(f"\n1,000 servers, 256 ranks: efficiency {shares}\n")
    assert (crowded.num_idle, crowded.most_requests) == (744, 256)
    assert now.num_idle == 0
    assert now.efficiency > 2 * crowded.efficiency


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_a_sync_takes_as_many_calls_as_the_table_says(num_servers):
    doubles = [NativeDouble({"a": torch.zeros(2)}) for _ in range(num_servers)]
    with serving(*doubles) as urls:
        sender = NativeSender([connected(url) for url in urls], rendezvous(), stage=False)
        sender.send([("a", torch.ones(2))], version=1)
        before = [len(double.calls) for double in doubles]
        sender.send([("a", torch.ones(2))], version=2)
        names = [name for double, seen in zip(doubles, before, strict=True) for name, _ in double.calls[seen:]]
        sender.close()
    fleet = Fleet(num_servers=num_servers, num_ranks=1, requests_per_rank=1)
    assert len([name for name in names if name != "health"]) == records_of(fleet, is_staged=True).control_calls


def test_a_step_s_journal_is_the_recorded_one_s():
    """The recorded run: two ranks, one server, 16 requests each."""
    sizes = event_bytes()
    recorded = sum(sizes[name] for name in (*EVERY_STEP, "called"))
    computed = records_of(Fleet(num_servers=1, num_ranks=2, requests_per_rank=16), is_staged=False).journal_bytes
    assert computed == pytest.approx(recorded, rel=0.1)


@pytest.mark.netns
def test_a_learner_sends_one_copy_over_gloo_however_many_servers_there_are():
    values = 500_000
    with two_hosts(delay_s=0.0, loss=0.0) as (learner, servers, _):
        for num_servers in (1, 3, 4, 8):
            sent = copies_sent(learner, servers, num_servers, values)
            assert [edge for edge in WAYS["chain"](num_servers) if edge[0] == LEARNER] == [(LEARNER, 1)]
            assert sent == pytest.approx(1, rel=0.05)


def copies_sent(learner, servers, num_servers, values):
    """How often the tensor has left the learner's host, whose group has so many workers on the other one."""
    port, groups = free_port(), {}

    def join(rank):
        with (learner if rank == num_servers else servers).entered():
            groups[rank] = GlooGroup.open(
                GroupAddress(
                    host=servers.address,
                    port=port,
                    rank=rank,
                    world_size=num_servers + 1,
                    secret="s" * 32,
                    timeout_s=60,
                    join_timeout_s=60,
                )
            )

    at_once(join, range(num_servers + 1))
    before, tensors = learner.sent_bytes(), [torch.ones(values) for _ in groups]
    at_once(lambda rank: groups[rank].broadcast(tensors[rank]), groups)
    sent = learner.sent_bytes() - before
    with ExitStack() as stack:
        for group in groups.values():
            stack.callback(group.close)
    return sent / (4 * values)


def at_once(call, ranks):
    threads = [threading.Thread(target=call, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_the_page_shows_what_the_simulation_says():
    """Its smaller rows; those of 1,000 servers come from the same lines of code."""
    rows = [line for line in tables(max_servers=64, max_steps=1000) if line]
    missing = [row for row in rows if row not in PAGE.read_text().splitlines()]
    assert not missing, "run python -m benchmarks.scale.table write"
    assert len(rows) == 19
