"""Placement, versions and ends: the pool over pretending replicas."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.stand_in import PretendingReplica, commit, pool_of, requests_for_ids
from rollmatch.server.engine_pool import EnginePool
from rollmatch.server.failures import Refusal, WorkerDead
from rollmatch.server.progress import CallProgress


@given(st.integers(0, 40), st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_blocks_are_contiguous_even_and_begin_where_least_is_to_be_done(num_draws, loads):
    async def place():
        pool = pool_of(len(loads))
        pool._loads = list(loads)
        return pool.place(num_draws), pool.place(num_draws)

    places, again = asyncio.run(place())
    assert places == again
    assert len(places) == num_draws
    counts = [places.count(index) for index in range(len(loads))]
    assert max(counts) - min(counts) <= 1
    order = list(dict.fromkeys(places))
    assert places == [index for index in order for _ in range(counts[index])]
    assert [loads[index] for index in order] == sorted(loads)[: len(order)]


@pytest.mark.scenario("topologies/one-optimizer-step-on-six-and-two")
def test_six_replicas_share_what_two_ranks_ask():
    async def run():
        pool = pool_of(6)
        asked = [[*range(10, 22)], [*range(30, 42)]]
        answered = await asyncio.gather(*(pool.generate_all(requests_for_ids(*ids)) for ids in asked))
        assert [[one.response_token_ids[0] for one, _ in drawn] for drawn in answered] == asked
        assert [len(replica.generated) for replica in pool.replicas] == [4] * 6

    asyncio.run(run())


def test_calls_that_arrive_together_go_to_different_replicas():
    async def run():
        pool = pool_of(2)
        await asyncio.gather(*(pool.generate_all(requests_for_ids(token_id)) for token_id in (10, 11)))
        assert [len(replica.generated) for replica in pool.replicas] == [1, 1]
        assert pool.num_running == 0

    asyncio.run(run())


def test_a_call_is_as_idle_as_the_response_that_stands_still_for_longest(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("rollmatch.server.progress.time", SimpleNamespace(monotonic=lambda: clock.now))
    progress = CallProgress()
    for request_id, call_id, replica in (("0", "a", 0), ("1", "a", 1), ("2", "b", 0), ("3", "", 0)):
        progress.begin(request_id, call_id, replica)

    assert progress.idle_s() == {"a": 0.0, "b": 0.0}, "before the first look"

    def look(*unfinished, finished=(0, 0)):
        progress.look(unfinished, finished)
        clock.now += 1.0
        return progress.idle_s()

    assert look({"0": 1, "2": 0}, {"1": 1}) == {"a": 0.0, "b": 0.0}
    assert look({"0": 2, "2": 0}, {"1": 1}) == {"a": 1.0, "b": 0.0}  # 2 waits for its turn behind 0
    assert look({"2": 0}, {"1": 1}, finished=(2, 0)) == {"a": 2.0, "b": 1.0}
    assert look({"2": 1}, {"1": 2}, finished=(2, 0)) == {"a": 2.0, "b": 0.0}  # 0 is gone without a message
    progress.end("0")
    assert look({"2": 1}, {"1": 3}, finished=(2, 0)) == {"a": 0.0, "b": 1.0}


def test_results_come_in_order_and_one_bad_item_ends_the_others():
    async def run():
        pool = pool_of()
        drawn = await pool.generate_all(requests_for_ids(*range(10, 20)))
        assert [one.response_token_ids[0] for one, _ in drawn] == list(range(10, 20))
        slow = EnginePool([PretendingReplica(0, delay_s=0.0), PretendingReplica(1, delay_s=5.0)])
        with pytest.raises(Refusal) as caught:
            await slow.generate_all(requests_for_ids(10, 7, 12, 13))
        assert caught.value.item == 1
        assert slow.replicas[1].ended == 2
        assert slow.num_running == 0

    asyncio.run(run())


@pytest.mark.scenario(clauses=["weight-sync/no-request-sees-two-versions#1"])
def test_a_commit_waits_then_restarts_what_is_left_under_the_new_version():
    async def run():
        pool = pool_of(1, delay_s=0.2)
        patient = asyncio.create_task(pool.generate_all(requests_for_ids(10)))
        await asyncio.sleep(0.02)
        assert await commit(pool, 1, drain_s=5) == 0
        assert (await patient)[0][1] == 0
        hurried = asyncio.create_task(pool.generate_all(requests_for_ids(10, 11)))
        await asyncio.sleep(0.02)
        late = []

        async def load():
            late.append(asyncio.create_task(pool.generate_all(requests_for_ids(12))))
            await asyncio.sleep(0.3)
            assert not late[0].done()
            return {}

        pool.replicas[0].answers["rollmatch_load"] = load
        assert await commit(pool, 2, drain_s=0.01) == 2
        assert [version for _, version in await hurried + await late[0]] == [2, 2, 2]
        assert pool.num_restarted == 2

    asyncio.run(run())


def test_a_caller_that_leaves_during_a_commit_is_not_drawn_again():
    async def run():
        pool = pool_of(1, delay_s=0.2)
        call = asyncio.create_task(pool.generate_all(requests_for_ids(10)))
        await asyncio.sleep(0.02)

        async def load():
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return {}

        pool.replicas[0].answers["rollmatch_load"] = load
        assert await commit(pool, 1, drain_s=0.01) == 1
        assert (pool.num_running, len(pool.replicas[0].generated)) == (0, 1)

    asyncio.run(run())


@pytest.mark.scenario(clauses=["rollout-server/health-is-answered-while-tokens-are-generated#2"])
def test_a_dead_replica_ends_what_waits_for_it():
    async def run():
        pool = pool_of(2, delay_s=30)
        watch = asyncio.create_task(pool.watch())
        call = asyncio.create_task(pool.generate_all(requests_for_ids(10, 11)))
        await asyncio.sleep(0.02)
        pool.replicas[1].is_gone = True
        with pytest.raises(WorkerDead):
            pool.check()  # before the watch has seen it
        with pytest.raises(WorkerDead):
            await asyncio.wait_for(call, 3)
        with pytest.raises(WorkerDead):
            await asyncio.wait_for(pool.call_all("rollmatch_poll"), 3)
        with pytest.raises(WorkerDead):
            pool.check()
        await watch

    asyncio.run(run())


def test_a_caller_that_leaves_before_the_workers_are_called_leaves_no_call_behind(recwarn):
    async def run():
        call = asyncio.create_task(pool_of().call_all("rollmatch_poll"))
        await asyncio.sleep(0)  # it has asked, and no worker's call has begun
        call.cancel()
        await asyncio.wait([call])
        return call.cancelled()

    assert asyncio.run(run())
    assert [str(warning.message) for warning in recwarn] == []  # Python's, of a coroutine that nobody awaits
