"""VinePPO as people start it: two training processes, one server, the five arguments of the guide."""

import sys

import pytest

from conformance.harness.judge import judge
from conformance.launch.started import finish, journal_of, started
from conformance.rollout.digits import ROOT
from conformance.wire.instance import free_port

pytestmark = pytest.mark.engine

CONFIG = ROOT / "fixtures/tasks/lock.yaml"
LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
    "accelerate": (
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
    ),
}


def overrides_for(out, variant):
    told = {
        "custom.trainer_variant": variant,
        "custom.extra.rollout_matching.rollout_backend": "vllm",
        "custom.extra.grpo.num_generations": 3,
        "custom.extra.vineppo.num_continuations": 2,
        "custom.extra.vineppo.step_tokens": 4,
        "custom.extra.vineppo.search.num_rounds": 1,
        "custom.extra.vineppo.search.num_per_round": 2,
        "custom.extra.vineppo.search.num_least": 1,
        "training.output_dir": out,
        "training.per_device_train_batch_size": 1,
        "training.max_steps": 8,
        "training.report_to": "none",
    }
    return [part for key, value in told.items() for part in ("--set", f"{key}={value}")]


@pytest.mark.clause("vineppo/every-process-generates-and-one-process-sends-weights#1,2,3,4,5")
@pytest.mark.clause("vineppo/vineppo-trainers-use-a-rollout-server-by-five-arguments#1")
def test_two_processes_generate_and_one_sends_weights(tmp_path):
    http, group = free_port(), free_port()
    serve = [sys.executable, "-m", "rollmatch.launch.cli", "vllm-serve", "--model", "fixtures/models/tasks"]
    serve += ["--port", str(http), "--dtype", "float32", "--max_model_len", "64", "--enable_prefix_caching", "True"]
    five = ["--use_vllm_server", "--vllm_host", "localhost", "--vllm_server_port", str(http)]
    five += ["--vllm_group_port", str(group), "--vllm_connection_timeout", "120"]
    with started(serve, tmp_path / "server.txt") as server:
        for launcher, variant in zip(LAUNCHERS, ("vineppo", "vineppo_mcts"), strict=True):
            out = tmp_path / launcher
            train = [sys.executable, *LAUNCHERS[launcher], "-m", "rollmatch.launch.cli", "train", str(CONFIG)]
            code, told = finish([*train, *overrides_for(out, variant), *five], tmp_path / f"{launcher}.txt")
            assert code == 0, told[-3000:] + server.told()[-2000:]
            check_run(out, is_first=launcher == "torchrun")


def check_run(out, *, is_first):
    journals = [journal_of(out, None, name=name) for name in ("journal.jsonl", "journal-rank1.jsonl")]
    if is_first:  # the judge wants versions to begin at 1, a later learner goes on from what the server holds
        assert judge(sorted((event for part in journals for event in part), key=lambda event: event["time"])) == []
    primary, other = journals
    synced = [event for event in primary if event["event"] == "synced"]
    assert len(synced) >= 2
    assert min(event["num_tensors"] for event in synced) > 0
    assert {event["num_tensors"] for event in other if event["event"] == "synced"} == {0}
    generated = [[e for e in part if e["event"] == "generated" and e["purpose"] == "train"] for part in journals]
    versions = [[event["policy_version"] for event in part] for part in generated]
    assert versions[0] == versions[1]
    assert len(set(versions[0])) == len(versions[0]) >= 2
    valued = [[event for event in part if event["event"] == "valued"] for part in journals]
    assert all(event["num_continuations"] > 0 for part in valued for event in part)
