"""Updates that are announced in chunks, over pretending workers: tied tensors, failures, trainers that died."""

import pytest
from starlette.testclient import TestClient

from conformance.doubles.stand_in import make_stand_in

ZERO, ONE = "0" * 32, "1" * 32


@pytest.fixture
def stand_in():
    parts, app = make_stand_in()
    with TestClient(app, base_url="http://testserver") as client:
        yield parts, client


@pytest.fixture
def tied(stand_in):
    """Names of a tied tensor and of what it is tied to."""
    ((alias, target),) = stand_in[0].model.aliases.items()
    return alias, target


def post(client, route, body=None):
    reply = client.post(route, json={} if body is None else body)
    return reply.status_code, reply.json().get("code")


def init(client):
    return post(client, "/init_communicator/", {"host": "127.0.0.1", "port": 23000, "world_size": 3})


def bucket(parts, *names):
    """Tensors of these names behind each other, as swift announces them."""
    entries, start = [], 0
    for name in names:
        spec = parts.model.tensors[parts.model.aliases.get(name, name)]
        size = 4
        for side in spec.shape:
            size *= side
        places = {"start_idx": start, "end_idx": start + size, "numel": size}
        entries.append({"name": name, "dtype": "torch.float32", "shape": list(spec.shape), **places})
        start += size
    return {"metadatas": entries}


def arrived(parts, digests):
    for replica in parts.pool.replicas:
        replica.answers["rollmatch_poll"] = {"state": "idle", "digests": digests}


def send(parts, client, digests, *names):
    arrived(parts, digests)
    first = post(client, "/update_flattened_params/", bucket(parts, *names))
    return first if first[0] != 200 else post(client, "/reset_prefix_cache/")


@pytest.mark.parametrize(("head", "expected"), [(ZERO, (200, None)), (ONE, (400, "digest-mismatch"))])
def test_a_tied_tensor_behind_all_others_belongs_to_their_update(stand_in, tied, head, expected):
    """The update commits before it; as TRL's FSDP2 path sends it."""
    parts, client = stand_in
    alias, target = tied
    init(client)
    assert send(parts, client, dict.fromkeys(parts.model.tensors, ZERO), *parts.model.tensors) == (200, None)
    assert parts.update.policy_version == 1
    assert send(parts, client, {alias: head}, alias) == expected
    assert parts.update.policy_version == 1
    assert send(parts, client, {target: ZERO}, target) == (400, "tensor-missing")


@pytest.mark.scenario(clauses=["weight-sync/a-wrong-update-is-refused-and-named#8"])
def test_what_a_refused_update_left_with_the_workers_is_dropped(stand_in, tied):
    parts, client = stand_in
    alias, _ = tied
    init(client)
    whole = dict.fromkeys(parts.model.tensors, ZERO)
    for replica in parts.pool.replicas:
        replica.calls.clear()
    assert send(parts, client, whole | {alias: ONE}, *parts.model.tensors, alias) == (400, "digest-mismatch")
    assert all(("rollmatch_drop",) in replica.calls for replica in parts.pool.replicas)
    assert send(parts, client, whole | {alias: ZERO}, *parts.model.tensors, alias) == (200, None)
    assert parts.update.policy_version == 1


@pytest.mark.parametrize(("is_lost", "expected"), [(True, (200, None)), (False, (409, "communicator-already-open"))])
def test_a_trainer_without_a_name_takes_the_place_of_one_that_died(stand_in, is_lost, expected):
    parts, client = stand_in
    assert init(client) == (200, None)
    for replica in parts.pool.replicas:
        replica.answers["rollmatch_members"] = {"lost": is_lost}
    assert init(client) == expected
