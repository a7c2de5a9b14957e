"""Divisions of a machine by the commands people type: rollout replicas here, learner ranks there.

Three and one run rollout matching; six and two run GRPO with DoRA on all parts of the model.
"""

import json
import shlex
import sys
from itertools import chain

import psutil
import pytest
import requests
from safetensors import safe_open

from conformance.harness.judge import judge
from conformance.launch.started import finish, journal_of, started
from conformance.rollout.digits import CONFIG, ROOT, absolute
from conformance.wire.instance import free_port
from rollmatch.launch.cli import main

VLLM = "custom.extra.rollout_matching.vllm"
GRPO = ROOT / "fixtures/digits/grpo-6v2.yaml"
STEPS = 2


def names_of(config, http, group):
    """The server, as each YAML names it."""
    if config == GRPO:
        return (
            f"model.model={ROOT}/fixtures/models/digits-summary",
            f"rlhf.vllm_server_port=[{http}]",
            f"rlhf.vllm_server_group_port={group}",
            "training.per_device_train_batch_size=2",
        )
    return (
        f"{VLLM}.mode=server",
        f"{VLLM}.server.base_url=http://127.0.0.1:{http}",
        f"{VLLM}.server.group_port={group}",
        "training.per_device_train_batch_size=6",
    )


def overrides_for(config, out, num_replicas):
    http = free_port()
    return http, (
        *names_of(config, http, free_port()),
        f"{VLLM}.kv_cache_memory_mib=64",
        f"custom.extra.rollout_server.vllm_data_parallel_size={num_replicas}",
        f"training.output_dir={out}",
        f"training.max_steps={STEPS}",
        "training.save_steps=1000",
        "training.eval_scenes=6",
        "training.report_to=none",
    )


def command(name, config, gpus, overrides):
    sets = [part for override in absolute(*overrides) for part in ("--set", override)]
    return [sys.executable, "-m", "rollmatch.launch.cli", name, str(config), "--gpus", gpus, *sets]


def adapted_parts(checkpoint):
    """Where adapters with a magnitude of their own are: DoRA."""
    with safe_open(checkpoint / "adapter_model.safetensors", "pt") as file:
        names = [name for name in file.keys() if "lora_magnitude_vector" in name]  # noqa: SIM118  # no mapping
    parts = (("aligner", "visual.merger"), ("vision", "visual.blocks"), ("language", "language_model"))
    return {part for part, infix in parts for name in names if infix in name}


@pytest.mark.engine
@pytest.mark.clause("topologies/three-rollout-gpus-and-one-learner-gpu-work-together#4")
@pytest.mark.clause("rollout-server/a-rollout-server-only-generates#1")
@pytest.mark.parametrize(
    ("config", "replicas", "learners"),
    [(CONFIG, "0,1,2", "3"), (GRPO, "0,1,2,3,4,5", "6,7")],
    ids=["three-and-one", "six-and-two"],
)
def test_replicas_only_generate_and_learners_only_learn(tmp_path, config, replicas, learners):
    out, num_replicas, num_ranks = tmp_path / "run", len(replicas.split(",")), len(learners.split(","))
    http, overrides = overrides_for(config, out, num_replicas)
    weights_before = set(tmp_path.rglob("*.safetensors"))
    with started(command("serve", config, replicas, overrides), tmp_path / "server.txt") as server:
        code, told = finish(command("train", config, learners, overrides), tmp_path / "learner.txt")
        assert code == 0, told[-3000:] + server.told()[-3000:]
        health = requests.get(f"http://127.0.0.1:{http}/health/", timeout=10).json()
        family = psutil.Process(server.process.pid).children(recursive=True)
    assert (health["replicas"], health["world_size"]) == (num_replicas, num_replicas)
    names = ["journal.jsonl", *(f"journal-rank{rank}.jsonl" for rank in range(1, num_ranks))]
    per_rank = [journal_of(out, None, name=name) for name in names]
    assert judge(sorted(chain(*per_rank), key=lambda event: event["time"])) == []
    synced = [(event["version"], event["mode"]) for event in per_rank[0] if event["event"] == "synced"]
    assert synced == [(version, "full") for version in range(1, STEPS + 2)]
    assert health["policy_version"] == STEPS + 1
    for events in per_rank:
        assert [e["policy_version"] for e in events if e["event"] == "generated" and e["purpose"] == "train"] == [1, 2]
    checkpoint = {path for path in tmp_path.rglob("*.safetensors") if f"checkpoint-{STEPS}" in path.parts}
    assert set(tmp_path.rglob("*.safetensors")) - weights_before == checkpoint, "weights went over the wire only"
    if config == GRPO:
        assert adapted_parts(out / f"checkpoint-{STEPS}") == {"vision", "aligner", "language"}
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, "the server leaves nobody behind"


@pytest.mark.parametrize(
    ("replicas", "learners"),
    [("0", "1"), ("0,1", "2,3"), ("0,1,2", "3"), ("0,1,2,3,4,5", "6,7")],
    ids=["one-and-one", "two-and-two", "three-and-one", "six-and-two"],
)
def test_one_file_makes_every_division_by_its_gpus_alone(capsys, monkeypatch, replicas, learners):
    monkeypatch.setattr("rollmatch.launch.rollout_server.has_gpu", lambda: True)
    sets = [part for override in absolute(*names_of(GRPO, 8080, 51216)) for part in ("--set", override)]
    assert main(["serve", str(GRPO), "--gpus", replicas, "--dry-run", *sets]) == 0
    served = shlex.split(capsys.readouterr().out)
    assert f"CUDA_VISIBLE_DEVICES={replicas}" in served
    settings = json.loads(served[-1])
    assert settings["data_parallel_size"] == len(replicas.split(","))
    assert (settings["tensor_parallel_size"], settings["port"], settings["max_model_len"]) == (1, 8080, 256)
    assert main(["train", str(GRPO), "--gpus", learners, "--dry-run", *sets]) == 0
    trained = shlex.split(capsys.readouterr().out)
    assert f"CUDA_VISIBLE_DEVICES={learners}" in trained
    processes = trained[trained.index("--nproc-per-node") + 1] if "--nproc-per-node" in trained else "1"
    assert processes == str(len(learners.split(",")))
