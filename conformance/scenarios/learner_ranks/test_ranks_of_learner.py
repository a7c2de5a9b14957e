"""Two real learner ranks, sharded by FSDP2: rank 0 alone syncs, both ask, and both fail alike.

As a script (``URL PORT FOLDER``) it is one of the ranks, which has no engine. It syncs and asks for rollouts at step 0
and again (no sync due), trains a step, does both at step 1; at step 2 the server refuses. It writes what it saw to
FOLDER/rankR.json and the gathered weights of step 1 beside it. ``peak_bytes`` is the most memory in gathered and merged
weights at a time.
"""

import json
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from conformance.doubles.instance import free_port
from conformance.doubles.learner_side import BUCKET_BYTES, make_fence, roll_out
from conformance.doubles.native_double import NativeDouble, serving
from conformance.doubles.sharded import make_model, split
from conformance.doubles.started import started_ranks
from rollmatch.errors import RollmatchError
from rollmatch.journal import read_journal
from rollmatch.model import adapters, checkpoint, sharding
from rollmatch.model.checkpoint import merged_weights
from rollmatch.ranks import Ranks
from rollmatch.weights.named_weights import named_weights

WORKER = ("-m", "conformance.scenarios.learner_ranks.test_ranks_of_learner")
REFUSE_AT = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    double = NativeDouble({name: as_served(name, weight) * 0 for name, weight in merged_weights(make_model())})
    with serving(double) as (url,):
        with started_ranks(folder, 2, sys.executable, *WORKER, url, str(free_port()), str(folder)) as ranks:
            ranks[0].wait_until(lambda: all((folder / f"ready{rank}").exists() for rank in (0, 1)))
            double.faults = {"refuse": "tensor-shape-mismatch"}
            (folder / "go").touch()
            assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].output()
        yield folder, double


def as_served(name, weight):
    """The server holds some weights that the ranks share in half the precision."""
    return weight.bfloat16() if "norm" in name or "embed" in name else weight


def saw(folder, rank):
    return json.loads((folder / f"rank{rank}.json").read_text())


@pytest.mark.scenario("learner-ranks/two-ranks-pass-the-fence")
def test_both_ranks_sync_once_a_step_and_ask_with_one_version(run):
    folder, _ = run
    for rank in (0, 1):
        events = [(e["step"], e["synced"], e["version"]) for e in saw(folder, rank)["events"]]
        assert events == [(0, True, 1), (0, False, 1), (1, True, 2)]
        journal = read_journal(folder / f"journal-rank{rank}.jsonl")
        assert [(e["step"], e["version"]) for e in journal] == [(0, 1), (1, 2)]


@pytest.mark.scenario("learner-ranks/spread-weights-arrive-whole")
def test_sharded_weights_arrive_whole_and_equal_those_of_one_rank(run):
    folder, double = run
    model = make_model()
    train(model)
    expected = dict(merged_weights(model))
    for rank in (0, 1):
        held = load_file(folder / f"rank{rank}.safetensors")
        assert held.keys() == expected.keys()
        assert all(torch.allclose(held[name], weight, atol=1e-6) for name, weight in expected.items())
        assert all(torch.equal(double.served[name], as_served(name, weight)) for name, weight in held.items())


def test_weights_are_gathered_in_the_types_of_the_server(run):
    folder, double = run
    num_bytes = sum(weight.nbytes for weight in double.served.values())
    for rank in (0, 1):
        assert {e["num_bytes"] for e in read_journal(folder / f"journal-rank{rank}.jsonl")} == {num_bytes}


@pytest.mark.scenario(
    "learner-ranks/split-weights-pass-by",
    clauses=["learner-ranks/only-the-main-process-sends-weights#5"],
)
def test_no_rank_holds_more_than_two_buckets_and_a_gather(run):
    folder, double = run
    bucket = largest_bucket(double.served)
    assert 0 < saw(folder, 0)["peak_bytes"] <= 2.5 * bucket
    assert saw(folder, 0)["left_bytes"] == 0
    assert saw(folder, 1)["peak_bytes"] == 0  # which only sends its rows


@pytest.mark.scenario(
    "learner-ranks/merged-weights-of-one-rank-pass-by",
    clauses=["learner-ranks/only-the-main-process-sends-weights#5"],
)
def test_one_rank_merges_as_it_sends_and_merges_again_for_a_server_that_was_started_again(attach_backend, monkeypatch):
    model, live = make_model(), LiveBytes()
    zeros = {name: weight * 0 for name, weight in merged_weights(model)}
    double = NativeDouble(zeros)
    backend = attach_backend(double)
    backend.sender.bucket_bytes = BUCKET_BYTES
    monkeypatch.setattr(adapters, "_merged", live.counting(adapters._merged))
    for version in (1, 2):
        backend.push(named_weights(model), version=version)
        assert double.policy_version == version
        assert all(torch.equal(double.served[name], weight) for name, weight in merged_weights(model))
        assert 0 < live.peak <= 2 * largest_bucket(zeros)
        assert live.now == 0
        double.restart(zeros)


def largest_bucket(weights):
    """Bytes of it; weights are much larger."""
    sizes = [weight.nbytes for weight in weights.values()]
    largest = max(BUCKET_BYTES, *sizes)
    assert sum(sizes) > 4 * largest
    return largest


@pytest.mark.scenario(
    "learner-ranks/rank-1-generates-but-does-not-sync",
    clauses=["learner-ranks/only-the-main-process-sends-weights#1,2"],
)
def test_only_one_rank_syncs_and_both_generate(run):
    _, double = run
    names = [name for name, _ in double.calls]
    assert names.count("communicator") == 1
    assert names.count("sync") + names.count("sync_again") == 3
    ids = [request["request_id"] for name, body in double.calls if name == "infer" for request in body["requests"]]
    assert sorted(ids) == ["0.0.0", "0.0.0", "0.1.0", "0.1.0", "1.0.0", "1.1.0"]


@pytest.mark.scenario(
    "learner-ranks/the-sync-of-rank-0-fails", clauses=["learner-ranks/a-failed-sync-fails-on-every-rank#2,4"]
)
def test_a_refused_sync_is_the_same_error_on_both_ranks_soon(run):
    folder, double = run
    first, second = saw(folder, 0), saw(folder, 1)
    assert first["error"] == second["error"]
    assert (first["error"]["code"], first["error"]["key"]) == ("push-failed", "sync")
    assert "rank 0" in first["error"]["problem"]
    assert "tensor-shape-mismatch" in first["error"]["problem"]
    assert max(first["seconds"], second["seconds"]) < 30
    assert double.policy_version == 2


def train(model):
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    ids = torch.arange(20, 36)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


class LiveBytes:
    """Memory of what functions return, or generators yield, as long as anybody holds it."""

    def __init__(self):
        self.now = self.peak = 0
        self._known = set()

    def counting(self, make):
        def counted(*args, **kwargs):
            made = make(*args, **kwargs)
            return list(map(self._counted, made)) if isinstance(made, list) else self._counted(made)

        return counted

    def counting_each(self, make):
        return lambda *args, **kwargs: map(self._counted, make(*args, **kwargs))

    def _counted(self, made):
        if made.is_meta:
            return made
        storage = made.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if address not in self._known:
            self._known.add(address)
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, address, num_bytes)
        return made

    def _free(self, address, num_bytes):
        self._known.discard(address)
        self.now -= num_bytes


def main(url, port, folder):
    dist.init_process_group("gloo")
    ranks = Ranks.from_environment()
    model, live = split(make_model()), LiveBytes()
    DTensor.full_tensor = live.counting(DTensor.full_tensor)
    sharding._empty_on_first = live.counting(sharding._empty_on_first)
    sharding._taken_apart = live.counting(sharding._taken_apart)
    checkpoint.each_whole = adapters.each_whole = live.counting_each(sharding.each_whole)
    sharding.GATHER_BYTES = {"cpu": BUCKET_BYTES // 4}
    adapters._merged = live.counting(adapters._merged)
    fence, saw = make_fence(url, int(port), folder, ranks), {"events": []}
    for step in (0, 0, 1):
        if step == 1:
            train(model)
        saw["events"].append(roll_out(fence, model, step))
    saw["peak_bytes"], saw["left_bytes"] = live.peak, live.now
    save_file(dict(named_weights(model)), folder / f"rank{ranks.rank}.safetensors")
    (folder / f"ready{ranks.rank}").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)
    began = time.monotonic()
    try:
        roll_out(fence, model, REFUSE_AT)
    except RollmatchError as error:
        saw["error"] = {"code": error.code, "key": error.key, "problem": error.problem}
    saw["seconds"] = time.monotonic() - began
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(saw))
    fence.backend.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], Path(sys.argv[3]))
