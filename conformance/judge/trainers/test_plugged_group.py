"""Weights over the plug-in's group reach the recording server's engine, and one announced wrongly is refused."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import torch

from conformance.doubles.digits import ROOT
from conformance.judge.ports import free_port
from conformance.judge.servers.broken.engine import TinyEngine
from conformance.judge.servers.broken.switches import Switches
from conformance.judge.trainers.arrivals import of_kind
from conformance.judge.trainers.server import RecordingServer, recording
from rollmatch.dialects.vllm.sender import FINISH, JOIN, START, UPDATE
from rollmatch.dialects.vllm.transports import GlooTransport
from rollmatch.weights.gloo import BUCKET_BYTES
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.plan import outgoing

MODEL = ROOT / "fixtures/models/tape"


@pytest.fixture
def opened():
    """The server, the learner's transport, and a pool for what runs beside a call."""
    server, transport = RecordingServer(TinyEngine(str(MODEL), Switches()), "vllm", dtype="float32"), GlooTransport()
    address = GroupAddress(
        host="127.0.0.1", port=free_port(), rank=0, world_size=2, secret="s" * 32, timeout_s=60, join_timeout_s=60
    )
    with recording(server, down_s=0.0), ThreadPoolExecutor(1) as pool:
        joining = pool.submit(transport.open, address)
        assert post(server, JOIN, {"init_info": transport.init_info(address, 1)}) == 200
        joining.result()
        assert post(server, START, {}) == 200
        yield server, transport, pool
        transport.close()


def post(server, route, body):
    return requests.post(server.url + route, json=body, timeout=120).status_code


def announced(transport, transfer):
    specs = transfer.plan.specs
    rows = {"names": [spec.name for spec in specs], "dtype_names": [spec.dtype for spec in specs]}
    return {"update_info": rows | {"shapes": [list(s.shape) for s in specs]} | transport.update_info(transfer.plan)}


def test_weights_of_the_plug_in_are_served_and_compared(opened):
    server, transport, pool = opened
    halved = {name: tensor.detach() / 2 for name, tensor in server.engine.weights.items()}
    transfer = outgoing(halved.items(), bucket_bytes=BUCKET_BYTES)
    sending = pool.submit(transport.send, transfer)
    assert post(server, UPDATE, announced(transport, transfer)) == 200
    sending.result()
    assert post(server, FINISH, {}) == 200
    [event] = of_kind(server.arrivals.events, "update")
    assert [event[name] for name in ("num_tensors", "missing", "unknown", "twice", "shapes", "dtypes")] == [
        len(halved), [], [], [], [], []
    ]  # fmt: skip
    assert all(torch.equal(halved[name], tensor) for name, tensor in server.engine.weights.items())


def test_what_breaks_off_is_refused_and_the_group_is_left(opened):
    server, transport, _ = opened
    transfer = outgoing(server.engine.weights.items(), bucket_bytes=BUCKET_BYTES)
    transport.close()
    assert post(server, UPDATE, announced(transport, transfer)) == 409
    assert post(server, START, {}) == 200
    assert post(server, UPDATE, announced(transport, transfer)) == 409
    assert not of_kind(server.arrivals.events, "update")
