"""Updates in place over pretending workers: refused while they are written, and what they leave behind."""

import pytest

from conformance.doubles.stand_in import refusal
from conformance.doubles.update_bodies import FAILURE, OPEN, first_of, full_sync, generate

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
