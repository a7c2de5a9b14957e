"""Weights from one GPU straight into the parameters of an engine on another, by NCCL."""

import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.gpu import receivers
from conformance.doubles.digits import MODEL, policy_weights
from conformance.doubles.instance import ENGINE, running
from conformance.doubles.learner_side import connected, rendezvous
from conformance.doubles.refusals import refused
from conformance.gpu.greedy import answers
from conformance.judge.calls import text_batch
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.weights.digest import add_mixed_in, mixed_digest_of, mixed_digests
from rollmatch.weights.nccl import DirectGroup

NUM_SCENES = 4
SMALL = ENGINE | {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.05}


@pytest.mark.gpu(1)
@pytest.mark.parametrize("num_bytes", [8, 4096, 2**20 + 24, 3 * 2**20 + 5])
def test_a_gpu_makes_the_digest_that_a_cpu_makes(num_bytes):
    torch.manual_seed(1)
    raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    for part in (raw, raw[2:]):
        assert mixed_digest_of(part.cuda()) == mixed_digest_of(part)
    other = raw.clone()
    other[num_bytes // 2] ^= 1
    assert mixed_digest_of(other.cuda()) != mixed_digest_of(raw)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("sizes", [(8, 4096, 2**20 + 24), (5, 8, 3)], ids=["whole words", "odd"])
def test_runs_of_one_memory_have_the_digests_of_their_bytes(sizes):
    raw = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8, device="cuda")
    sums = torch.zeros(len(sizes), 2, dtype=torch.int64, device="cuda")
    add_mixed_in(raw, sizes, sums)
    assert mixed_digests(sums) == [mixed_digest_of(part.cpu()) for part in torch.split(raw, sizes)]


weights_of = partial(policy_weights, scale=0.05)


@pytest.fixture
def fresh_answers(tmp_path):
    """Those of an engine of the same settings that reads the weights from a checkpoint."""

    def ask(weights, arguments=SMALL, **fields):
        directory = tmp_path / "checkpoint"
        shutil.copytree(MODEL, directory)
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in weights.items()}, directory / "model.safetensors"
        )
        with running(tmp_path / "fresh.log", model=str(directory), engine_arguments=arguments, **fields) as fresh:
            return answers(fresh.server, NUM_SCENES)

    return ask


@pytest.fixture
def learner_device():
    """The last GPU."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(device)
    return device


def sender_to(server, *, stage=False):
    return NativeSender([connected(server.url)], rendezvous(join_timeout_s=60.0), stage=stage)


def push(sender, server, weights):
    version = server.version + 1
    sender.send(weights.items(), version=version)
    assert server.version == version
    assert sender.transport == "direct"


@pytest.mark.gpu(2)
def test_a_synced_server_writes_what_a_fresh_one_writes_and_repairs_what_was_broken_off(
    tmp_path, learner_device, fresh_answers, monkeypatch
):
    fields = {"gpus": ("0",), "drain_s": 0.1}
    weights = weights_of(1, learner_device)
    wanted = fresh_answers(weights, **fields)
    with running(tmp_path / "log", load_format="dummy", engine_arguments=SMALL, **fields) as instance:
        server, sender = instance.server, sender_to(instance.server)
        push(sender, server, weights_of(0, learner_device))
        before = answers(server, NUM_SCENES)
        push(sender, server, weights)
        assert answers(server, NUM_SCENES) == wanted != before
        break_off(sender, server, weights, monkeypatch)
        push(sender, server, weights)
        assert answers(server, NUM_SCENES) == wanted
        sender.stage = True
        break_off(sender, server, weights_of(0, learner_device), monkeypatch)
        assert answers(server, NUM_SCENES) == wanted
        push(sender, server, weights_of(0, learner_device))
        assert answers(server, NUM_SCENES) == before
        sender.close()


QUANTIZED = SMALL | {"quantization": "fp8_per_channel"}


@pytest.mark.gpu(2)
def test_an_engine_that_quantizes_writes_what_a_fresh_one_writes(tmp_path, learner_device, fresh_answers):
    """In place there is no room for what is sent; it comes beside."""
    fields = {"gpus": ("0",), "drain_s": 0.1, "dtype": "bfloat16"}
    weights, others = (weights_of(seed, learner_device) for seed in (1, 2))
    wanted = fresh_answers(weights, QUANTIZED, **fields)
    with running(tmp_path / "log", load_format="dummy", engine_arguments=QUANTIZED, **fields) as instance:
        check_in_turn(instance.server, weights, others, wanted)


@pytest.mark.gpu(2)
def test_graphs_of_an_engine_that_quantizes_read_what_was_sent_last(tmp_path, learner_device):
    """Of the same engine: another one's compiled kernels may round otherwise."""
    fields = {"gpus": ("0",), "drain_s": 0.1, "dtype": "bfloat16"}
    weights, others = (weights_of(seed, learner_device) for seed in (1, 2))
    arguments = QUANTIZED | {"enforce_eager": False}
    with running(tmp_path / "log", load_format="dummy", engine_arguments=arguments, **fields) as instance:
        sender = sender_to(instance.server)
        push(sender, instance.server, weights)
        sender.close()
        check_in_turn(instance.server, weights, others, answers(instance.server, NUM_SCENES))


def check_in_turn(server, weights, others, wanted):
    """``wanted`` is written by ``weights`` alone, received while nothing is generated and beside generation."""
    for stage in (False, True):
        sender = sender_to(server, stage=stage)
        push(sender, server, others)
        assert answers(server, NUM_SCENES) != wanted
        push(sender, server, weights)
        assert answers(server, NUM_SCENES) == wanted
        sender.close()


def break_off(sender, server, weights, monkeypatch):
    """The learner leaves after two buckets; the server says so and generates nothing, or with what it had."""
    sender.close()
    sender.bucket_bytes, sent = 2**16, []

    def send(self, tensors, real=DirectGroup.broadcast_group):
        if len(sent) == 2:
            self.close()
        sent.append(tensors)
        return real(self, tensors)

    version = server.version + 1
    with monkeypatch.context() as patched:
        patched.setattr(DirectGroup, "broadcast_group", send)
        with refused("transfer-failed"):
            sender.send(weights.items(), version=version)
    body = {"requests": text_batch([[5]]), "sampling": {"max_tokens": 2}}
    status, found = server.post_packed("/native/infer/", body)
    assert (status, found.get("code")) == ((200, None) if sender.stage else (409, "weights-broken"))
    sender.bucket_bytes = 0


@pytest.mark.gpu(3)
def test_two_tensor_parallel_ranks_keep_their_parts(tmp_path, learner_device, fresh_answers):
    fields = {"gpus": ("0", "1"), "tensor_parallel_size": 2}
    weights = weights_of(1, learner_device)
    wanted = fresh_answers(weights, **fields)
    with running(tmp_path / "log", load_format="dummy", engine_arguments=SMALL, **fields) as instance:
        sender = sender_to(instance.server)
        push(sender, instance.server, weights)
        assert answers(instance.server, NUM_SCENES) == wanted
        sender.close()


@pytest.mark.gpu(4)
@pytest.mark.scenario(
    "weight-sync/three-receivers-cost-what-one-costs", clauses=["weight-sync/weights-travel-in-memory#3"]
)
def test_three_receivers_cost_what_one_costs():
    """Ten syncs of 16 GB to each, by the benchmark that keeps its samples."""
    found = receivers.measure()
    assert (found["num_servers"], len(found["samples_s"]["all"])) == (torch.cuda.device_count() - 1, receivers.ROUNDS)
    assert found["all / one"] <= receivers.BAR, found["samples_s"]
