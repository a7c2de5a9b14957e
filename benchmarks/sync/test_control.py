"""What announcing weights costs: a native sync of many tiny tensors beside one call per tensor, as TRL has it."""

import itertools
from datetime import timedelta

import pytest
import requests
import torch.distributed as dist

from benchmarks.sync.receiving_server import TIMEOUT_S, native_sender, receiving, weights_of
from conformance.doubles.instance import free_port

NUM_TENSORS, NUM_FLOATS = 399, 1


class KeptConnection:
    """TRL's client: one session for all calls, JSON."""

    def __init__(self, url):
        self.url, self.session = url, requests.Session()
        self.session.trust_env = False

    def post(self, route, body=None):
        reply = self.session.post(self.url + route, json=body, timeout=TIMEOUT_S)
        return reply.status_code, reply.json()


class QueuedLearner:
    """TRL's trainer: one call, one broadcast and one barrier per tensor, in vLLM's own group; gloo for NCCL."""

    def __init__(self, server, *, port):
        self.server, self.port = server, port

    def open(self):
        from vllm.distributed.utils import StatelessProcessGroup

        body = {"host": "127.0.0.1", "port": self.port, "world_size": 2, "client_device_uuid": "cpu"}
        reply = self.server.post("/init_communicator/", body)
        self.group = StatelessProcessGroup.create("127.0.0.1", self.port, 1, 2, store_timeout=20)
        store = dist.PrefixStore("gloo", self.group.store)
        self.gloo = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=20))
        return reply

    def close(self):
        self.group = self.gloo = None
        return self.server.post("/close_communicator/")

    def update_named(self, name, tensor):
        body = {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
        status, _ = self.server.post("/update_named_param/", body)
        assert status == 200
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 1, 0
        self.gloo.broadcast([tensor.contiguous()], options).wait()
        self.group.barrier()


@pytest.fixture(scope="module")
def urls():
    """Two servers, because each takes weights from one learner at a time."""
    with receiving(NUM_TENSORS, NUM_FLOATS, num_servers=2) as receivers:
        yield receivers


@pytest.fixture
def sync_natively(urls):
    """Sends all tensors as the next version; the group is open already."""
    weights, versions = weights_of(NUM_TENSORS, NUM_FLOATS), itertools.count(1)
    with native_sender(urls[0]) as sender:

        def sync():
            sender.send(weights, version=next(versions))

        sync()
        yield sync


@pytest.fixture
def sync_as_trl(urls):
    """One call, one broadcast and one barrier per tensor; the last reset waits for the commit."""
    learner = QueuedLearner(KeptConnection(urls[1]), port=free_port())
    assert learner.open()[0] == 200
    weights, num_syncs = weights_of(NUM_TENSORS, NUM_FLOATS), itertools.count(1)

    def sync():
        for name, tensor in weights:
            learner.update_named(name, tensor)
        assert learner.server.post("/reset_prefix_cache/")[0] == 200
        next(num_syncs)

    sync()
    yield sync
    assert requests.get(f"{urls[1]}/health/", timeout=TIMEOUT_S).json()["policy_version"] == next(num_syncs) - 1
    learner.close()


def test_one_announcement_beside_one_call_per_tensor(side_by_side, sync_natively, sync_as_trl):
    side_by_side(sync_natively, sync_as_trl, bar=50, rounds=7)
