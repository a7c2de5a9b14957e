"""Every field of a body about groups and weights reaches the workers, or decides what becomes of it.

Values are never defaults. A field without a line in ``HELD`` fails; what is named there shows it.
"""

import pytest

from conformance.doubles.field_effects import fields_of, with_field
from conformance.doubles.stand_in import PretendingReplica, refusal
from conformance.doubles.update_bodies import calls_of, full_sync
from rollmatch.dialects.swift.bodies import FlatAdapter
from rollmatch.dialects.trl.bodies import CommunicatorInit, FlatBucket, NamedParam
from rollmatch.dialects.vllm.bodies import InitBody
from rollmatch.server.failures import REFUSALS
from rollmatch.server.payloads import CommunicatorClose, CommunicatorRequest, SyncAgain, SyncChoice, SyncRequest
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.plan import Merge, Spec
from rollmatch.weights.transfer_plan import MergePlan, TransferPlan, from_wire

OPEN = {
    "client": "me", "host": "127.0.0.2", "port": 23001, "world_size": 6, "secret": "of this test's other group",
    "rank_offset": 2, "transport": "direct", "timeout_s": 7.5, "join_timeout_s": 9.5, "replace": False,
}  # fmt: skip
"""The workers' ranks are 2 and 3; 0, 1 and 4 are those of other servers."""
STAGED = OPEN | {"transport": "gloo"}
UP, DOWN = (f"model.language_model.layers.{layer}.mlp.up_proj" for layer in (0, 1))
INIT = {"master_address": "127.0.0.2", "master_port": 23001, "rank_offset": 2, "world_size": 6}


def opened(parts):
    """Address and transport that each worker was given."""
    return [(from_wire(raw, GroupAddress), transport) for _, raw, transport in calls_of(parts, "rollmatch_open")]


def received(parts):
    """The plan that the first worker and the second one got alike, call by call."""
    plans = [from_wire(call[1], TransferPlan) for call in calls_of(parts, "rollmatch_receive")]
    half = len(plans) // 2
    assert plans[:half] == plans[half:]
    return plans[:half]


def loads(parts):
    return len(calls_of(parts, "rollmatch_load")) // 2


def test_all_workers_join_the_group_that_the_body_describes(start):
    parts, post, _ = start()
    assert post("/native/communicator/", OPEN) == (200, {"ranks": [2, 3], "transport": "direct"})
    shared = {"host": "127.0.0.2", "port": 23001, "world_size": 6, "secret": OPEN["secret"]}
    limits = {"timeout_s": 7.5, "join_timeout_s": 9.5, "source": None}
    assert opened(parts) == [(GroupAddress(rank=rank, **shared, **limits), "direct") for rank in (2, 3)]


def test_a_group_is_replaced_by_its_own_client_where_it_says_so(start):
    parts, post, _ = start()
    post("/native/communicator/", OPEN)
    assert refusal(post("/native/communicator/", OPEN), "code") == (409, "communicator-already-open")
    for replaces in (False, True):
        other = OPEN | {"client": "you", "replace": replaces}
        assert refusal(post("/native/communicator/", other), "code") == (409, "client-already-attached")
    assert len(opened(parts)) == 2
    assert post("/native/communicator/", OPEN | {"replace": True, "port": 23002})[0] == 200
    assert [address.port for address, _ in opened(parts)] == [23001, 23002, 23001, 23002]
    assert len(calls_of(parts, "rollmatch_close")) == 2


def test_a_group_is_closed_by_its_client_or_by_force(start):
    parts, post, _ = start()
    left = {"closed": False, "leaving": False}
    assert post("/native/communicator/close/", {"client": "me"}) == (200, left)
    for closing in ({"client": "me"}, {"client": "you", "force": True}, {"force": True}):
        post("/native/communicator/", OPEN)
        for wrong in ({"client": "you"}, {"client": "you", "force": False}, {}):
            assert refusal(post("/native/communicator/close/", wrong), "code") == (409, "client-already-attached")
        parts.pool.replicas[1].answers["rollmatch_close"] = {"leaving": "force" in closing}
        gone = {"closed": True, "leaving": "force" in closing}
        assert post("/native/communicator/close/", closing) == (200, gone)


@pytest.mark.parametrize("digests", ["announced", "behind"])
@pytest.mark.parametrize("commit", [True, False])
def test_all_workers_receive_what_a_sync_announces_and_its_learner_decides(start, digests, commit):
    parts, post, _ = start()
    post("/native/communicator/", STAGED)
    body = full_sync(parts, sync_id="s", version=7, commit=commit)
    num = len(body["tensors"])
    body |= {"buckets": [3, num - 3], "digests": body["digests"] if digests == "announced" else None}
    for other in (body | {"client": "you"}, body | {"version": 0}):
        assert 400 <= post("/native/sync/", other)[0] < 500
    status, reply = post("/native/sync/", body)
    is_announced = digests == "announced"
    wanted = {
        "instance": parts.instance, "policy_version": 7 if commit else 0, "committed": commit, "merged_digests": {},
        "digests": body["digests"] or ["0" * 32] * num, "restarted": 0,
    }  # fmt: skip
    assert status == 200, reply
    assert (reply.pop("receive_s") > 0, (reply.pop("commit_s") > 0) == commit) == (True, True)
    assert reply == wanted
    assert received(parts) == [
        TransferPlan(
            tensors=tuple(Spec(each["name"], each["dtype"], tuple(each["shape"])) for each in body["tensors"]),
            buckets=(3, num - 3), sync_id="s", digests=tuple(body["digests"]) if is_announced else None,
            digests_follow=not is_announced, may_repeat=not is_announced, aliases=tuple(sorted(parts.model.aliases)),
        )
    ]  # fmt: skip
    assert loads(parts) == commit
    if commit:
        return
    for wrong in ({"client": "you", "sync_id": "s"}, {"client": "me", "sync_id": "t"}):
        assert post("/native/sync/commit/", wrong)[0] == 409
    assert refusal(post("/native/sync/drop/", {"client": "you"}), "code") == (409, "client-already-attached")
    assert loads(parts) == 0
    status, reply = post("/native/sync/commit/", {"client": "me", "sync_id": "s"})
    assert (status, reply["committed"], reply["policy_version"], loads(parts)) == (200, True, 7, 1)
    assert post("/native/sync/drop/", {"client": "me"}) == (200, {"dropped": False})
    assert post("/native/sync/", body | {"version": 8})[0] == 200
    assert post("/native/sync/drop/", {"client": "me", "sync_id": "s"}) == (200, {"dropped": True})
    assert post("/native/sync/commit/", {"client": "me"})[1]["code"] == "nothing-staged"


def test_an_announcement_by_name_has_a_version_and_a_choice_of_its_own(start):
    parts, post, _ = start()
    post("/native/communicator/", STAGED)
    assert post("/native/sync/", full_sync(parts, digests=None))[0] == 200
    again = {"client": "me", "sync_id": "t", "version": 5, "like": "1", "commit": False}
    status, reply = post("/native/sync/again/", again)
    assert (status, reply["committed"], reply["policy_version"]) == (200, False, 1)
    assert {call[1:] for call in calls_of(parts, "rollmatch_receive_again")} == {("t", "1")}
    assert post("/native/sync/commit/", {"client": "me", "sync_id": "t"})[1]["policy_version"] == 5


@pytest.mark.parametrize("route", ["/native/sync/", "/native/sync/again/"])
def test_responses_are_kept_where_the_learner_says_so_and_the_server_may(start, route):
    parts, post, _ = start(engine_arguments={"scheduler_cls": "x"})
    post("/native/communicator/", STAGED)
    assert post("/native/sync/", full_sync(parts, digests=None))[0] == 200
    again = {"client": "me", "sync_id": "t", "version": 5, "like": "1"}
    body = full_sync(parts, sync_id="t", version=5) if route == "/native/sync/" else again
    assert refusal(post(route, body | {"keep": True})) == (409, "keep-unavailable", "keep")
    assert post(route, body)[0] == 200


def factors(parts, rank=4):
    """Tensors of an adapter of two weights, as the native dialect announces them, and their merges."""
    weights = [parts.model.tensors[f"{name}.weight"] for name in (UP, DOWN)]
    tensors, merges = [], []
    for place, weight in enumerate(weights):
        (rows, columns), names = weight.shape, {role: f"{weight.name}.{role}" for role in ("lora_a", "lora_b")}
        shapes = {"lora_a": [rank, columns], "lora_b": [rows, rank]}
        tensors += [{"name": names[role], "dtype": "float32", "shape": shapes[role]} for role in names]
        merges.append({"name": weight.name, **names, "scaling": 0.5 + place})
    magnitude = {"name": "magnitude", "dtype": "float32", "shape": [weights[1].shape[0]]}
    merges[1]["magnitude"] = "magnitude"
    return [*tensors, magnitude], merges


@pytest.mark.parametrize("transport", ["gloo", "direct"])
@pytest.mark.parametrize("has_digests", [True, False])
def test_all_workers_merge_as_the_adapter_says(start, transport, has_digests):
    parts, post, _ = start()
    post("/native/communicator/", OPEN | {"transport": transport})
    tensors, merges = factors(parts)
    merged = {f"{name}.weight": letter * 32 for name, letter in ((UP, "a"), (DOWN, "b"))}
    body = {"client": "me", "sync_id": "s", "version": 3, "tensors": tensors, "buckets": [len(tensors)]}
    body["adapter"] = {"merges": merges, "merged_digests": merged if has_digests else None}
    names = [each["name"] for each in tensors]
    for replica in parts.pool.replicas:
        digests = dict.fromkeys(names, "0" * 32) | (merged if transport == "direct" else {})
        replica.answers["rollmatch_poll"] = {"state": "idle", "digests": digests}
        replica.answers["rollmatch_merge"] = {"digests": merged}
    status, reply = post("/native/sync/", body)
    assert status == 200, reply
    assert (reply["merged_digests"], reply["digests"]) == (merged, ["0" * 32] * len(tensors))
    held = tuple(Spec(each.name, each.dtype, each.shape) for each in parts.model.tensors.values())
    plan = MergePlan(
        merges=tuple(Merge(**each) for each in merges), merged_digests=merged if has_digests else None, model=held
    )
    (received_plan,) = received(parts)
    sent = [from_wire(call[1], MergePlan) for call in calls_of(parts, "rollmatch_merge")]
    if transport == "direct":
        assert (received_plan.merge, received_plan.in_place, sent) == (plan, True, [])
    else:
        assert (received_plan.merge, received_plan.in_place, sent) == (None, False, [plan] * 2)


@pytest.mark.parametrize(("host", "given"), [("127.0.0.2", "127.0.0.2"), ("0.0.0.0", "127.0.0.3")])
def test_trainers_of_trl_and_swift_are_the_last_rank_of_the_group_that_they_name(start, host, given):
    """A wildcard, which they send by default, stands for the server's own host."""
    parts, post, _ = start(host="127.0.0.3")
    body = {"host": host, "port": 23005, "world_size": 3, "client_device_uuid": "42"}
    status, reply = post("/init_communicator/", body)
    assert (status, reply) == (200, {"message": f"listening at {given}:23005, waiting for rank 2"})
    limits = {"timeout_s": 30.0, "join_timeout_s": 60.0}
    addresses = [GroupAddress(host=given, port=23005, rank=rank, world_size=3, **limits) for rank in (0, 1)]
    assert opened(parts) == [(address, "stateless") for address in addresses]
    assert post("/init_communicator/", body | {"world_size": 4})[0] in (400, 409)


def test_trainers_of_stock_servers_are_rank_0_of_the_group_that_they_name(start):
    parts, post, _ = start()
    assert post("/init_weight_transfer_engine/", {"init_info": INIT | {"world_size": 4}})[0] == 200
    limits = {"timeout_s": 120.0, "join_timeout_s": 60.0, "source": 0}
    shared = {"host": "127.0.0.2", "port": 23001, "world_size": 4}
    assert opened(parts) == [(GroupAddress(rank=rank, **shared, **limits), "stateless") for rank in (2, 3)]


def chunk(specs):
    """Metadata of a bucket, in bytes."""
    entries, start_idx = [], 0
    for spec in specs:
        size = Spec(spec.name, spec.dtype, spec.shape).num_bytes
        entry = {"name": spec.name, "dtype": f"torch.{spec.dtype}", "shape": list(spec.shape)}
        entries.append(entry | {"start_idx": start_idx, "end_idx": start_idx + size, "numel": size})
        start_idx += size
    return entries


def test_each_chunk_is_one_broadcast_of_the_tensors_that_it_names(start):
    parts, post, _ = start()
    post("/init_communicator/", {"host": "127.0.0.2", "port": 23005, "world_size": 3})
    for replica in parts.pool.replicas:
        replica.answers["rollmatch_poll"] = {"state": "receiving", "digests": {}, "share": 0.0}
    first, *some = list(parts.model.tensors.values())[:4]
    named = {"name": first.name, "dtype": f"torch.{first.dtype}", "shape": list(first.shape)}
    assert post("/update_named_param/", named) == (200, {"message": f"ready to receive {first.name}"})
    assert post("/update_flattened_params/", {"metadatas": chunk(some)}) == (
        200,
        {"message": "ready to receive 3 tensors"},
    )
    for entry in ("start_idx", "end_idx"):
        wrong = with_field({"metadatas": chunk(some)}, f"metadatas.{entry}", 1)
        assert refusal(post("/update_flattened_params/", wrong)) == (400, "bucket-invalid", "metadatas[2]")
    plans = [(plan.tensors, plan.buckets, plan.sync_id) for plan in received(parts)]
    assert plans == [
        (tuple(Spec(each.name, each.dtype, each.shape) for each in group), (len(group),), None)
        for group in ([first], some)
    ]
    post("/close_communicator/")


@pytest.mark.parametrize(
    ("config", "scaling"), [({"lora_alpha": 8.0}, 2.0), ({"lora_alpha": 6.0, "use_rslora": True}, 3.0), ({}, None)]
)
def test_an_adapter_of_ms_swift_is_merged_by_its_configuration(start, config, scaling):
    parts, post, _ = start()
    post("/init_communicator/", {"host": "127.0.0.2", "port": 23005, "world_size": 3})
    specs = []
    for name in (UP, DOWN):
        rows, columns = parts.model.tensors[f"{name}.weight"].shape
        for role, shape in (("lora_A", (4, columns)), ("lora_B", (rows, 4))):
            specs.append(Spec(f"base_model.model.{name}.{role}.weight", "float32", shape))
    body = {"peft_config": config | {"r": 4, "bias": "none"}, "metadatas": chunk(specs)}
    biased = with_field(body, "peft_config.bias", "all")
    if scaling is None:
        assert refusal(post("/update_adapter_flattened_param/", body))[:2] == (422, "body-invalid")
        return
    assert refusal(post("/update_adapter_flattened_param/", biased))[1] == "adapter-invalid"
    assert post("/update_adapter_flattened_param/", body) == (
        200,
        {"message": "ready to receive an adapter of 4 tensors"},
    )
    assert post("/reset_prefix_cache/")[0] == 200
    plans = [from_wire(call[1], MergePlan) for call in calls_of(parts, "rollmatch_merge")]
    for plan in plans:
        assert [(each.name, each.scaling) for each in plan.merges] == [(f"{n}.weight", scaling) for n in (UP, DOWN)]
        assert [(each.lora_a, each.lora_b) for each in plan.merges] == [
            (specs[i].name, specs[i + 1].name) for i in (0, 2)
        ]
    assert len(plans) == 2


HELD = {
    CommunicatorRequest: {*OPEN},
    CommunicatorClose: {"client", "force"},
    SyncRequest: {
        "client", "sync_id", "version", "tensors", "tensors.name", "tensors.dtype", "tensors.shape", "buckets",
        "digests", "commit", "keep", "adapter", "adapter.merges", "adapter.merged_digests",
        *(f"adapter.merges.{name}" for name in ("name", "lora_a", "lora_b", "magnitude", "scaling")),
    },
    SyncAgain: {"client", "sync_id", "version", "like", "commit", "keep"},
    SyncChoice: {"client", "sync_id"},
    CommunicatorInit: {"host", "port", "world_size"},
    NamedParam: {"name", "dtype", "shape"},
    FlatBucket: {
        "metadatas", *(f"metadatas.{name}" for name in ("name", "dtype", "shape", "start_idx", "end_idx", "numel"))
    },
    FlatAdapter: {
        "metadatas", *(f"metadatas.{name}" for name in ("name", "dtype", "shape", "start_idx", "end_idx", "numel")),
        "peft_config", "peft_config.lora_alpha", "peft_config.use_rslora", "peft_config.bias",
    },
    InitBody: {
        "init_info", *(f"init_info.{name}" for name in INIT), "init_info.nccl_unique_id_b64",
        # test_vllm_routes.py
        *(f"init_info.{name}" for name in ("packed", "packed_buffer_size_bytes", "packed_num_buffers")),
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", HELD)
def test_every_field_is_held_above(kind):
    assert set(dict(fields_of(kind))) == HELD[kind]


CODES = {
    400: "request-id-repeated prompt-missing messages-invalid images-misfit token-id-invalid prompt-too-long "
    "sampling-value-invalid engine-refused structure-refused image-unreadable image-url-refused",
    401: "bearer-key-missing bearer-key-wrong",
    403: "image-path-outside-roots host-refused origin-refused",
    404: "route-unknown model-unknown",
    405: "method-not-allowed",
    408: "body-too-slow",
    409: "weights-not-set weights-broken policy-changed generation-aborted update-in-progress",
    413: "image-too-large body-too-large",
    415: "content-type-refused",
    422: "body-invalid call-too-large",
    429: "server-busy",
    501: "openai-unavailable",
}
"""What each code means in HTTP (RFC 9110, RFC 6585); the state of the server's weights is a conflict."""


def test_a_refusal_has_the_status_that_http_gives_its_reason():
    assert {code: status for code, (status, _) in REFUSALS.items()} == {
        code: status for status, codes in CODES.items() for code in codes.split()
    }


def test_what_a_server_is_and_serves_is_said_in_full(start):
    fields = {"tensor_parallel_size": 3, "gpus": tuple("012345"), "enable_lora": True, "max_model_len": 99}
    parts, post, client = start(**fields, engine_arguments={"kv_transfer_config": {"a": 1}})
    post("/native/communicator/", STAGED | {"world_size": 9})
    post("/native/sync/", full_sync(parts, version=4))
    about, model = client.get("/native/identity/").json(), parts.model
    assert isinstance(about.pop("vllm_version"), str)
    assert about == {
        "protocol": 5, "instance": parts.instance, "model": parts.settings.model, "model_digest": model.digest,
        "policy_version": 4, "tensors": [each.model_dump(mode="json") for each in model.tensors.values()],
        "aliases": model.aliases, "tensor_parallel_size": 3, "data_parallel_size": 2, "world_size": 6,
        "max_model_len": 99, "transports": ["direct", "gloo"], "digest": about["digest"], "adapter_merge": True,
        "keep": False,
    }  # fmt: skip
    health = client.get("/health/").json()
    assert health.pop("lag_s") < 60
    assert health == {
        "status": "ok", "state": "serving", "policy_version": 4, "replicas": 2, "world_size": 6, "running": 0,
        "progress": 0, "calls": {}, "instance": parts.instance, "gpus": list("012345"),
    }  # fmt: skip
    assert client.get("/get_world_size/").json() == {"world_size": 6}
    assert client.get("/get_model_state_keys/").json() == {"keys": list(model.tensors)}
    assert client.get("/server_info/").json()["vllm_config"] == {
        "model_config": {
            "model": parts.settings.model, "dtype": "torch.float32", "max_model_len": 99,
            "logprobs_mode": "processed_logprobs",
        },
        "parallel_config": {"tensor_parallel_size": 3, "data_parallel_size": 2},
        "lora_config": None,
        "weight_transfer_config": {"backend": "nccl"},
    }  # fmt: skip


class Emptied(PretendingReplica):
    """Says what became of its caches."""

    def __init__(self, index, **fields):
        super().__init__(index, **fields)
        self.num_resets, self.is_free = 0, True

    async def reset_caches(self):
        self.num_resets += 1
        return self.is_free


@pytest.fixture
def emptied(start):
    """A server over such engines: a function that posts, and one that counts resets of each engine since the last."""
    parts, post, _ = start(kind=Emptied)

    def resets():
        counts = [replica.num_resets for replica in parts.pool.replicas]
        for replica in parts.pool.replicas:
            replica.num_resets = 0
        return counts

    return parts, post, resets


@pytest.mark.scenario(clauses=["server-dialects/a-success-is-reported-after-the-fact#2"])
def test_a_pause_clears_caches_unless_it_says_otherwise_and_a_word_that_it_does_not_have_is_refused(emptied):
    """A pause of another mode would end responses that were to be kept."""
    _, post, resets = emptied
    for query, key in (("mode=stop", "mode"), ("clear_cache=maybe", "clear_cache"), ("mod=wait", "mod")):
        status, reply = post(f"/pause?{query}")
        assert (status, reply["code"], reply["key"], bool(reply["remedy"])) == (422, "body-invalid", key, True)
        assert resets() == [0, 0]
    for query, counts in (("", [1, 1]), ("?clear_cache=true", [1, 1]), ("?clear_cache=false", [0, 0])):
        for mode in ("abort", "wait", "keep"):
            whole = f"/pause{query}{'&' if query else '?'}mode={mode}"
            assert post(whole) == (200, {"status": "paused"})
            assert post("/resume") == (200, {"status": "resumed"})
            assert resets() == counts, whole


@pytest.mark.parametrize("name", ["prefix", "encoder", "mm"])
def test_caches_of_all_engines_are_emptied_and_one_that_is_not_is_said(emptied, name):
    parts, post, resets = emptied
    assert post(f"/reset_{name}_cache/") == (200, {"message": "caches reset, status: True", "success": True})
    assert resets() == [1, 1]
    parts.pool.replicas[1].is_free = False
    assert post(f"/reset_{name}_cache/")[1] == {"message": "caches reset, status: False", "success": False}


def test_what_a_server_counts_is_what_happened(start):
    parts, post, client = start()
    post("/native/communicator/", STAGED)
    post("/native/sync/", full_sync(parts, version=4))
    body = {"prompts": [[5], [6], [8]], "max_tokens": 4}
    assert post("/generate/", body)[0] == 200
    assert post("/generate/", {})[0] == 422
    lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics/").text.splitlines() if line[0] != "#")
    found = {name.removeprefix("rollmatch_"): float(value) for name, value in lines.items()}
    wanted = {
        "running_requests": 0, "policy_version": 4, "alive": 1, "generated_tokens": 12, "restarted_requests": 0,
        "group_members": 6, 'replica_tokens{replica="0"}': 8, 'replica_tokens{replica="1"}': 4,
        'requests_total{route="/generate/",status="200"}': 1, 'requests_total{route="/generate/",status="422"}': 1,
        'requests_total{route="/native/sync/",status="200"}': 1, 'request_seconds_count{route="/generate/"}': 2,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    assert client.get("/health/").json()["progress"] == 12
