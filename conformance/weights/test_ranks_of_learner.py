"""Two real learner ranks, sharded by FSDP2: rank 0 alone syncs, both ask, and both fail alike."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conformance.cli.started import started_ranks
from conformance.server.instance import free_port
from conformance.weights.native_double import NativeDouble, serving
from conformance.weights.ranks_of_learner import BUCKET_BYTES, LiveBytes, make_model, train
from rollmatch.journal import read_journal
from rollmatch.model import checkpoint
from rollmatch.model.checkpoint import merged_weights
from rollmatch.weights.named_weights import named_weights

SCRIPT = Path(__file__).with_name("ranks_of_learner.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    double = NativeDouble({name: as_served(name, weight) * 0 for name, weight in merged_weights(make_model())})
    with serving(double) as (url,):
        with started_ranks(folder, 2, sys.executable, str(SCRIPT), url, str(free_port()), str(folder)) as ranks:
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
def test_one_rank_merges_as_it_sends_and_merges_again_for_a_server_that_was_started_again(attach, monkeypatch):
    model, live = make_model(), LiveBytes()
    zeros = {name: weight * 0 for name, weight in merged_weights(model)}
    double = NativeDouble(zeros)
    backend = attach(double)
    backend.sender.bucket_bytes = BUCKET_BYTES
    monkeypatch.setattr(checkpoint, "_merged", live.counting(checkpoint._merged))
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
