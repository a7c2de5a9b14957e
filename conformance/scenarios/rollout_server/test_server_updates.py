"""Updates over pretending workers: what they report reaches the learner whole, and leaves the right state behind."""

import time

import pytest

from conformance.doubles.stand_in import refusal
from conformance.doubles.update_bodies import FAILURE, OPEN, calls_of, first_of, full_sync, generate, merging
from rollmatch.dialects.trl.bodies import FlatTensor
from rollmatch.dialects.trl.control_routes import check_places
from rollmatch.server.announced import AnnouncementInvalid


def mixed(sync_body):
    return {"tensors": [first_of(sync_body) | {"dtype": "bfloat16"}, *sync_body["tensors"][1:]]}


@pytest.mark.scenario(
    "rollout-server/the-version-grows-with-an-update",
    clauses=[
        "rollout-server/every-rollout-names-the-weights-that-made-it#1,2",
        "server-dialects/a-success-is-reported-after-the-fact#1",
    ],
)
def test_one_message_announces_everything_and_is_answered_after_the_commit(stand_in, post):
    parts, _ = stand_in
    assert post("/native/communicator/", OPEN) == (200, {"ranks": [0, 1], "transport": "gloo"})
    assert generate(post)[1]["responses"][0]["policy_version"] == 0
    sync_body, began = full_sync(parts), time.perf_counter()
    status, returned = post("/native/sync/", sync_body)
    assert (status, returned["policy_version"], returned["committed"]) == (200, 1, True)
    spent = returned["receive_s"], returned["commit_s"]
    assert min(spent) > 0
    assert sum(spent) < time.perf_counter() - began
    assert returned["digests"] == sync_body["digests"]
    (plan,) = {str(call[1]) for call in calls_of(parts, "rollmatch_receive")}
    assert len(calls_of(parts, "rollmatch_load")) == 2
    assert {wait_s for _, wait_s in calls_of(parts, "rollmatch_poll")} == {0.0}  # workers that generate do not wait
    assert sync_body["digests"][-1] in plan
    assert generate(post)[1]["responses"][0]["policy_version"] == 1


@pytest.mark.parametrize(
    ("change", "code", "key"),
    [
        (lambda sync_body: {"buckets": [1]}, "bucket-invalid", "buckets"),
        (lambda sync_body: {"digests": sync_body["digests"][1:]}, "bucket-invalid", "digests"),
        (lambda sync_body: {"tensors": [*sync_body["tensors"][:-1], sync_body["tensors"][0]]}, "tensor-repeated", None),
        (lambda sync_body: mixed(sync_body), "bucket-invalid", "buckets[0]"),
        (lambda sync_body: merging("none"), "tensor-unknown", "none"),
        (lambda sync_body: merging(first_of(sync_body)["name"]), "adapter-invalid", "adapter.merges[0]"),
    ],
)  # fmt: skip
def test_an_announcement_that_does_not_hold_together_reaches_no_worker(stand_in, post, change, code, key):
    parts, _ = stand_in
    post("/native/communicator/", OPEN)
    sync_body = full_sync(parts)
    status, returned = post("/native/sync/", sync_body | change(sync_body))
    assert (status, returned["code"]) == (400, code)
    assert key is None or returned["key"] == key
    assert calls_of(parts, "rollmatch_receive") == []
    assert post("/native/sync/", sync_body)[0] == 200


@pytest.mark.scenario(clauses=["weight-sync/a-wrong-update-is-refused-and-named#2"])
def test_an_incomplete_or_older_update_is_refused(stand_in, post):
    parts, _ = stand_in
    post("/native/communicator/", OPEN)
    whole = full_sync(parts)
    part = {"tensors": whole["tensors"][1:], "buckets": [len(whole["tensors"]) - 1], "digests": None}
    assert refusal(post("/native/sync/", whole | part)) == (400, "tensor-missing", first_of(whole)["name"])
    assert post("/native/sync/", whole | {"version": 4})[1]["policy_version"] == 4
    for version in (3, 4):
        assert refusal(post("/native/sync/", whole | {"version": version})) == (409, "version-not-newer", "version")
    assert post("/native/sync/", whole | {"version": 5})[0] == 200


@pytest.mark.scenario(clauses=["server-dialects/the-swift-dialect-serves-ms-swift-trainers#4"])
@pytest.mark.parametrize("places", [(0, 11), (0, 6), (1, 13), (4, 16)])
def test_a_bucket_counts_bytes_from_zero(places):
    returned = {"name": "a", "dtype": "torch.bfloat16", "shape": (2, 3), "numel": 12}
    then = {"name": "b", "dtype": "float32", "shape": (2,), "start_idx": 12, "end_idx": 20, "numel": 8}
    check_places([FlatTensor(**returned, start_idx=0, end_idx=12), FlatTensor(**then)])
    with pytest.raises(AnnouncementInvalid) as refused:
        check_places([FlatTensor(**returned, start_idx=places[0], end_idx=places[1]), FlatTensor(**then)])
    assert refused.value.key == "metadatas[0]"


def again(like, **fields):
    return {"client": "me", "sync_id": "again", "version": 2, "like": like} | fields


@pytest.mark.parametrize("transport", ["gloo", "direct"])
def test_an_announcement_may_be_repeated_by_its_name_in_the_same_group(stand_in, post, transport):
    parts, wide = stand_in[0], OPEN | {"transport": transport}
    post("/native/communicator/", wide)
    assert post("/native/sync/again/", again("1"))[1]["code"] == "announcement-unknown"
    sync_body = full_sync(parts, digests=None)
    first = post("/native/sync/", sync_body)
    assert first[0] == 200
    for version, sync_id in ((2, "two"), (3, "three")):
        status, returned = post("/native/sync/again/", again("1", sync_id=sync_id, version=version))
        assert (status, returned["policy_version"], returned["digests"]) == (200, version, first[1]["digests"])
        assert calls_of(parts, "rollmatch_receive_again")[-1][1:] == (sync_id, "1")
    for wrong, code in (
        (again("two", version=4), "announcement-unknown"),
        (again("1", version=3), "version-not-newer"),
        (again("1", version=4, client="you"), "client-already-attached"),
    ):
        assert refusal(post("/native/sync/again/", wrong), "code") == (409, code)
    assert post("/native/communicator/close/", {"client": "me"})[1]["closed"]
    post("/native/communicator/", wide)
    assert post("/native/sync/again/", again("1", version=4))[1]["code"] == "announcement-unknown"
    assert post("/native/sync/", sync_body | {"version": 4})[0] == 200
    assert post("/native/sync/again/", again("1", version=5))[0] == 200


def test_what_came_with_digests_or_an_adapter_is_not_repeated_by_name(stand_in, post):
    parts, _ = stand_in
    post("/native/communicator/", OPEN)
    assert post("/native/sync/", full_sync(parts))[0] == 200
    assert post("/native/sync/again/", again("1"))[1]["code"] == "announcement-unknown"
    assert post("/native/sync/", full_sync(parts, sync_id="2", version=2, digests=None))[0] == 200
    assert post("/native/sync/again/", again("2", version=3))[0] == 200


@pytest.mark.scenario(
    "weight-sync/a-failed-staged-update-leaves-the-old-weights",
    clauses=["weight-sync/no-request-sees-two-versions#2", "server-dialects/a-success-is-reported-after-the-fact#2,3"],
)
def test_a_failed_transfer_closes_the_communicator_and_keeps_the_weights(stand_in, post):
    parts, _ = stand_in
    post("/native/communicator/", OPEN)
    parts.pool.replicas[1].answers["rollmatch_poll"] = {"failure": FAILURE}
    status, returned = post("/native/sync/", full_sync(parts))
    assert (status, returned["code"], returned["problem"]) == (409, "transfer-failed", "peer is gone")
    assert len(calls_of(parts, "rollmatch_close")) == 2
    assert generate(post)[1]["policy_version"] == 0
    assert post("/native/sync/", full_sync(parts))[1]["code"] == "communicator-missing"
    parts.pool.replicas[1].answers.clear()
    assert post("/native/communicator/", OPEN)[0] == 200
    assert post("/native/sync/", full_sync(parts))[0] == 200


@pytest.mark.scenario(clauses=["weight-sync/a-sync-may-keep-responses-under-way#7"])
@pytest.mark.parametrize("arguments", [{"scheduler_cls": "my.Scheduler"}, {"kv_transfer_config": {"a": 1}}])
def test_an_engine_that_cannot_count_versions_keeps_no_responses(start, arguments):
    parts, post, client = start(engine_arguments=arguments)
    assert client.get("/native/identity/").json()["keep"] is False
    post("/native/communicator/", OPEN)
    for body in (full_sync(parts, keep=True), full_sync(parts, keep=True, commit=False)):
        assert refusal(post("/native/sync/", body)) == (409, "keep-unavailable", "keep")
    assert calls_of(parts, "rollmatch_receive") == []
    assert post("/native/sync/", full_sync(parts))[0] == 200


def test_workers_that_received_different_bytes_are_found(stand_in, post):
    parts, _ = stand_in
    post("/native/communicator/", OPEN)
    names = list(parts.model.tensors)
    digests = dict.fromkeys(names, "0" * 32)
    parts.pool.replicas[0].answers["rollmatch_poll"] = {"state": "idle", "digests": digests}
    parts.pool.replicas[1].answers["rollmatch_poll"] = {"state": "idle", "digests": digests | {names[3]: "1" * 32}}
    assert refusal(post("/native/sync/", full_sync(parts, digests=None))) == (409, "digest-mismatch", names[3])
    assert calls_of(parts, "rollmatch_load") == []
    assert len(calls_of(parts, "rollmatch_drop")) == 2


@pytest.mark.scenario(
    "weight-sync/a-failed-update-in-place-is-repaired-by-a-full-sync",
    clauses=["weight-sync/no-request-sees-two-versions#4"],
)
def test_a_load_that_fails_on_one_worker_stops_generation_until_a_full_sync(stand_in, post):
    parts, _ = stand_in
    post("/native/communicator/", OPEN)
    parts.pool.replicas[1].answers["rollmatch_load"] = {"failure": FAILURE | {"code": "weights-broken"}}
    assert refusal(post("/native/sync/", full_sync(parts)), "code") == (409, "weights-broken")
    assert generate(post)[1].get("code") == "weights-broken"
    assert stand_in[1].get("/health/").json()["state"] == "weights-broken"
    parts.pool.replicas[1].answers.clear()
    assert post("/native/sync/", full_sync(parts, sync_id="2"))[0] == 200
    assert generate(post)[1]["policy_version"] == 1


def test_too_small_a_group_and_a_second_client_are_refused(stand_in, post):
    assert post("/native/communicator/", OPEN | {"world_size": 2})[1]["code"] == "world-size-mismatch"
    assert post("/native/communicator/", OPEN | {"rank_offset": 1})[1]["code"] == "world-size-mismatch"
    assert post("/native/communicator/", OPEN | {"rank_offset": 1, "world_size": 4})[1]["ranks"] == [1, 2]
    assert post("/native/communicator/", OPEN)[1]["code"] == "communicator-already-open"
    assert post("/native/communicator/", OPEN | {"client": "you"})[1]["code"] == "client-already-attached"
    assert post("/native/communicator/", OPEN | {"replace": True})[0] == 200
    assert post("/native/communicator/close/", {"client": "you"})[1]["code"] == "client-already-attached"
    assert post("/native/communicator/close/", {"client": "you", "force": True}) == (
        200,
        {"closed": True, "leaving": False},
    )


def test_a_group_port_in_use_leaves_nobody_attached(stand_in, post):
    parts, _ = stand_in
    parts.pool.replicas[0].answers["rollmatch_open"] = {"failure": FAILURE | {"code": "group-port-in-use"}}
    assert post("/native/communicator/", OPEN)[1]["code"] == "group-port-in-use"
    parts.pool.replicas[0].answers.clear()
    assert post("/native/communicator/", OPEN)[0] == 200


@pytest.mark.scenario(
    "rollout-server/a-control-call-without-the-key-is-refused",
    clauses=[
        "rollout-server/the-server-keeps-to-itself#4",
        "rollout-server/health-is-answered-while-tokens-are-generated#3",
    ],
)
def test_a_key_guards_every_route_but_health(start):
    _, _, client = start(api_key="secret")
    assert client.get("/health").status_code == client.get("/health/").status_code == 200
    for headers, code in (({}, "bearer-key-missing"), ({"authorization": "Bearer wrong"}, "bearer-key-wrong")):
        reply = client.post("/reset_prefix_cache/", headers=headers)
        assert (reply.status_code, reply.json().get("code")) == (401, code)
    assert client.post("/reset_prefix_cache/", headers={"authorization": "Bearer secret"}).status_code == 200
    described = client.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()["paths"]
    routes = {(method, route) for route in described for method in described[route] if not route.startswith("/health")}
    assert len(routes) > 20
    for method, route in routes | {("get", "/openapi.json"), ("get", "/docs"), ("get", "/metrics/"), ("get", "/none")}:
        assert client.request(method, route).status_code == 401, route


def test_metrics_count_calls_by_route_and_status(stand_in, post):
    generate(post)
    post("/native/infer/", {})
    text = stand_in[1].get("/metrics").text
    assert 'rollmatch_requests_total{route="/native/infer/",status="200"} 1.0' in text
    assert 'rollmatch_requests_total{route="/native/infer/",status="422"} 1.0' in text
    assert "rollmatch_generated_tokens 2.0" in text
