"""Both divisions of a machine by the commands people type: rollout replicas here, learner ranks there."""

import sys
from itertools import chain

import psutil
import pytest
import requests

from conformance.harness.judge import judge
from conformance.launch.started import finish, journal_of, started, train_command
from conformance.rollout.digits import CONFIG, absolute
from conformance.wire.instance import free_port

pytestmark = pytest.mark.engine

VLLM = "custom.extra.rollout_matching.vllm"
STEPS = 2


def overrides_for(out, num_replicas):
    http, group = free_port(), free_port()
    return http, (
        f"{VLLM}.mode=server",
        f"{VLLM}.server.base_url=http://127.0.0.1:{http}",
        f"{VLLM}.server.group_port={group}",
        f"{VLLM}.kv_cache_memory_mib=64",
        f"custom.extra.rollout_server.vllm_data_parallel_size={num_replicas}",
        f"training.output_dir={out}",
        f"training.max_steps={STEPS}",
        "training.per_device_train_batch_size=6",
        "training.save_steps=1000",
        "training.eval_scenes=6",
        "training.report_to=none",
    )


def serve_command(gpus, overrides):
    sets = [part for override in absolute(*overrides) for part in ("--set", override)]
    return [sys.executable, "-m", "rollmatch.launch.cli", "serve", str(CONFIG), "--gpus", gpus, *sets]


@pytest.mark.clause("topologies/three-rollout-gpus-and-one-learner-gpu-work-together#4")
@pytest.mark.clause("rollout-server/a-rollout-server-only-generates#1")
@pytest.mark.parametrize(
    ("replicas", "learners"), [("0,1,2", "3"), ("0,1,2,3,4,5", "6,7")], ids=["three-and-one", "six-and-two"]
)
def test_replicas_only_generate_and_learners_only_learn(tmp_path, replicas, learners):
    out, num_replicas, num_ranks = tmp_path / "run", len(replicas.split(",")), len(learners.split(","))
    http, overrides = overrides_for(out, num_replicas)
    weights_before = set(tmp_path.rglob("*.safetensors"))
    with started(serve_command(replicas, overrides), tmp_path / "server.txt") as server:
        code, told = finish(train_command(*overrides, flags=("--gpus", learners)), tmp_path / "learner.txt")
        assert code == 0, told[-3000:] + server.told()[-3000:]
        health = requests.get(f"http://127.0.0.1:{http}/health/", timeout=10).json()
        family = psutil.Process(server.process.pid).children(recursive=True)
    assert (health["replicas"], health["world_size"]) == (num_replicas, num_replicas)
    names = ["journal.jsonl", *(f"journal-rank{rank}.jsonl" for rank in range(1, num_ranks))]
    per_rank = [journal_of(out, None, name=name) for name in names]
    assert judge(sorted(chain(*per_rank), key=lambda event: event["time"])) == []
    assert [e["version"] for e in per_rank[0] if e["event"] == "synced"] == list(range(1, STEPS + 2))
    assert health["policy_version"] == STEPS + 1
    for events in per_rank:
        assert [e["policy_version"] for e in events if e["event"] == "generated" and e["purpose"] == "train"] == [1, 2]
    checkpoint = {path for path in tmp_path.rglob("*.safetensors") if f"checkpoint-{STEPS}" in path.parts}
    assert set(tmp_path.rglob("*.safetensors")) - weights_before == checkpoint, "weights went over the wire only"
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, "the server leaves nobody behind"
