"""Groups and adapters that cannot be: refused before a worker hears of them."""

import pytest

from conformance.doubles.stand_in import refusal
from conformance.doubles.update_bodies import OPEN, calls_of, full_sync, merging
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.transfer_plan import from_wire


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"world_size": 2**40}, "world_size"),
        ({"join_timeout_s": 1e6}, "join_timeout_s"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"secret": "short"}, "secret"),
        ({"transport": "stateless"}, "transport"),
    ],
)
def test_an_impossible_group_reaches_no_worker(stand_in, post, change, key):
    status, returned = post("/native/communicator/", OPEN | change)
    assert (status in (400, 422), returned["key"]) == (True, key)
    assert calls_of(stand_in[0], "rollmatch_open") == []
    assert post("/native/communicator/", OPEN)[0] == 200


@pytest.mark.parametrize(
    ("named", "opened"), [("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")]
)
def test_a_host_of_every_interface_is_the_servers_own(stand_in, post, named, opened):
    """TRL and ms-swift name 0.0.0.0, where a store without a secret would listen."""
    assert post("/init_communicator/", {"host": named, "port": 23000, "world_size": 3})[0] == 200
    hosts = {from_wire(wire, GroupAddress).host for _, wire, *_ in calls_of(stand_in[0], "rollmatch_open")}
    assert hosts == {opened}


def adapter_sync(parts, **changes):
    """A LoRA of rank 2 on the first matrix of the model."""
    spec = next(spec for spec in parts.model.tensors.values() if len(spec.shape) == 2)
    shapes = {"a": [2, spec.shape[1]], "b": [spec.shape[0], 2]}
    sent = [{"name": name, "dtype": "float32", "shape": shapes[name]} | changes.get(name, {}) for name in shapes]
    return full_sync(parts, tensors=sent, buckets=[1, 1], digests=None) | merging(spec.name)


@pytest.mark.parametrize(
    "changes",
    [
        {"a": {"dtype": "save"}},
        {"b": {"dtype": "int64"}},
        {"b": {"shape": [2**40, 2]}},
    ],
)
def test_an_adapter_that_cannot_be_merged_reaches_no_worker(stand_in, post, changes):
    parts, _ = stand_in
    post("/native/communicator/", OPEN)
    status, returned = post("/native/sync/", adapter_sync(parts, **changes))
    assert status == 400
    assert returned["code"] in ("tensor-dtype-mismatch", "adapter-invalid", "bucket-invalid")
    assert calls_of(parts, "rollmatch_receive") == []
    for replica in parts.pool.replicas:
        replica.answers["rollmatch_merge"] = {"digests": {}}
    assert post("/native/sync/", adapter_sync(parts))[0] == 200


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({}, None),
        ({"a": [2, 1]}, "weight"),
        ({"a": [3, None]}, "weight"),
        ({"a": [], "b": [None, 0]}, "weight"),
        ({"a": [0, None], "b": [None, 0]}, "weight"),
        ({"b": [1, 2]}, "weight"),
        ({"b": [None, 2, 2]}, "weight"),
        ({"m": [None]}, None),
        ({"m": [1, None]}, None),
        ({"m": [3]}, "weight"),
        ({"unused": [1]}, "unused"),
    ],
)  # fmt: skip
def test_an_adapter_fits_the_weight_it_is_merged_with(stand_in, post, monkeypatch, change, key):
    """None in a shape is the weight's own length there; rank 2."""
    parts, _ = stand_in
    for replica in parts.pool.replicas:
        monkeypatch.setattr(replica, "answers", replica.answers | {"rollmatch_merge": {"digests": {}}})
    post("/native/communicator/", OPEN)
    sync_body = full_sync(parts)
    weight = next(spec for spec in sync_body["tensors"] if len(spec["shape"]) == 2 and spec["shape"][0] > 3)
    rows, columns = weight["shape"]
    shapes = {"a": [2, None], "b": [None, 2]} | change
    own = {"a": columns}
    tensors = [
        {"name": name, "dtype": "float32", "shape": [own.get(name, rows) if size is None else size for size in shape]}
        for name, shape in shapes.items()
    ]
    merge = merging(weight["name"])["adapter"]["merges"][0] | ({"magnitude": "m"} if "m" in change else {})
    adapter = {"tensors": tensors, "buckets": [len(tensors)], "digests": None, "adapter": {"merges": [merge]}}
    status, reply = post("/native/sync/", sync_body | adapter)
    if key is None:
        assert reply.get("code") != "adapter-invalid"
        assert len(calls_of(parts, "rollmatch_receive")) == 2
    else:
        expected = weight["name"] if key == "weight" else key
        assert (status, reply["code"], reply["key"]) == (400, "adapter-invalid", expected)


GROUP = {"host": "127.0.0.1", "port": 23000, "world_size": 3}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"shape": [1]}, "tensor-shape-mismatch"),
        ({"dtype": "int64"}, "tensor-dtype-mismatch"),
        ({"name": "x"}, "tensor-unknown"),
    ],
)
def test_a_wrong_tensor_reaches_no_worker_and_another_float_is_taken(start, change, code):
    parts, post, _ = start()
    spec = next(iter(parts.model.tensors.values())).model_dump(mode="json")
    assert post("/init_communicator/", GROUP)[0] == 200
    assert refusal(post("/update_named_param/", spec | change), "code") == (400, code)
    assert not any(call[0] == "rollmatch_receive" for replica in parts.pool.replicas for call in replica.calls)
    assert post("/update_named_param/", spec | {"dtype": "bfloat16"})[0] == 200
