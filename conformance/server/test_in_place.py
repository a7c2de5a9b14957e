"""Updates in place over pretending workers: refused while they are written, and what they leave behind."""

import asyncio

import pytest

from conformance.server.stand_in import refusal
from conformance.server.test_server_updates import FAILURE, OPEN, calls_of, first_of, full_sync, generate
from rollmatch.dialects.native.in_place import InPlaceUpdate
from rollmatch.dialects.native.sync_routes import Update
from rollmatch.server.engine_pool import WRITING

DIRECT = OPEN | {"transport": "direct"}


@pytest.fixture
def stand_in(stand_in):
    recover(stand_in[0])
    return stand_in


def fail(parts, **whole):
    """One worker fails, and says how its model is."""
    parts.pool.replicas[1].answers |= {"rollmatch_poll": {"failure": FAILURE}, "rollmatch_whole": whole}


def recover(parts):
    for replica in parts.pool.replicas:
        replica.answers = {"rollmatch_whole": {"whole": True}}


@pytest.mark.scenario(clauses=["weight-sync/no-request-sees-two-versions#3"])
def test_calls_are_refused_while_weights_are_written(stand_in, post, monkeypatch):
    parts, seen = stand_in[0], []
    assert post("/native/communicator/", DIRECT)[0] == 200
    settle = parts.communicator.settle

    async def ask_meanwhile(**keywords):
        try:
            parts.pool.check()
        except Exception as error:  # noqa: BLE001 - whatever it says is judged
            seen.append((error.code, error.status))
        return await settle(**keywords)

    monkeypatch.setattr(parts.communicator, "settle", ask_meanwhile)
    status, body = post("/native/sync/", full_sync(parts))
    assert (status, body["policy_version"], body["committed"]) == (200, 1, True)
    assert seen == [("update-in-progress", 409)]
    assert calls_of(parts, "rollmatch_poll")[-1][1] > 0  # workers wait, for they generate nothing
    status, body = generate(post)
    assert (status, body["policy_version"]) == (200, 1)


@pytest.mark.parametrize(("whole", "code"), [(False, "weights-broken"), (True, None)])
def test_what_a_failure_leaves_depends_on_whether_a_byte_was_written(stand_in, post, whole, code):
    parts = stand_in[0]
    post("/native/communicator/", DIRECT)
    fail(parts, whole=whole)
    assert refusal(post("/native/sync/", full_sync(parts))) == (409, "transfer-failed", "broadcast")
    status, body = generate(post)
    assert (status, body.get("code")) == (409 if code else 200, code)
    recover(parts)
    assert post("/native/communicator/", DIRECT)[0] == 200
    assert post("/native/sync/", full_sync(parts))[1]["policy_version"] == 1
    assert generate(post)[0] == 200


def test_weights_are_kept_beside_and_committed_where_the_learner_stages(stand_in, post):
    parts = stand_in[0]
    post("/native/communicator/", DIRECT)
    status, body = post("/native/sync/", full_sync(parts, commit=False))
    assert (status, body["committed"], generate(post)[1]["policy_version"]) == (200, False, 0)
    status, body = post("/native/sync/commit/", {"client": DIRECT["client"]})
    assert (status, body["committed"], generate(post)[1]["policy_version"]) == (200, True, 1)


@pytest.mark.parametrize("commit", [True, False])
def test_what_was_announced_in_place_is_not_staged_by_its_name(stand_in, post, commit):
    parts = stand_in[0]
    post("/native/communicator/", DIRECT)
    assert post("/native/sync/", full_sync(parts, digests=None, commit=commit))[0] == 200
    if not commit:
        assert post("/native/sync/commit/", {"client": "me"})[0] == 200
    like = {"client": "me", "sync_id": "2", "version": 2, "like": "1"}
    other = like | {"commit": not commit}
    assert refusal(post("/native/sync/again/", other)) == (409, "announcement-unknown", "like")
    assert post("/native/sync/again/", like | {"commit": commit})[1]["committed"] == commit


def test_parts_of_a_model_are_not_kept_beside(start):
    parts, post, _ = start(tensor_parallel_size=2, data_parallel_size=1)
    recover(parts)
    post("/native/communicator/", DIRECT)
    assert refusal(post("/native/sync/", full_sync(parts, commit=False))) == (400, "in-place-not-staged", "commit")
    assert post("/native/sync/", full_sync(parts))[0] == 200


def test_a_wrong_announcement_is_refused_before_anything_is_paused(stand_in, post):
    parts = stand_in[0]
    post("/native/communicator/", DIRECT)
    sync_body = full_sync(parts)
    wrong = sync_body | {"tensors": [first_of(sync_body) | {"shape": [1]}, *sync_body["tensors"][1:]]}
    assert refusal(post("/native/sync/", wrong)) == (400, "tensor-shape-mismatch", first_of(sync_body)["name"])
    assert not any(call[0] == "rollmatch_receive" for replica in parts.pool.replicas for call in replica.calls)
    assert post("/native/sync/", sync_body)[0] == 200


def test_a_caller_that_hangs_up_does_not_end_an_update(stand_in):
    """What was received is served, whoever listens; its group is closed."""
    from rollmatch.server.payloads import SyncRequest

    parts, may_end = stand_in[0], asyncio.Event()
    update = Update(parts)
    settle = parts.communicator.settle

    async def wait(**keywords):
        await may_end.wait()
        return await settle(**keywords)

    async def hang_up():
        from rollmatch.weights.group_address import GroupAddress

        address = GroupAddress(host="127.0.0.1", port=23000, rank=0, world_size=3, timeout_s=5, join_timeout_s=5)
        await parts.communicator.open("me", address, transport="direct")
        parts.communicator.settle = wait
        call = asyncio.create_task(InPlaceUpdate(update).write(SyncRequest(**full_sync(parts))))
        while parts.pool.state != WRITING:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        may_end.set()
        while update.is_busy:
            await asyncio.sleep(0)

    asyncio.run(hang_up())
    assert parts.pool.policy_version == 1
    assert parts.communicator.attached is None
