"""Whole runs on real GPUs, by the commands people type: a policy that learns, from rollouts by the weights it has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from conformance.doubles.digits import CONFIG, ROOT, absolute, template_of
from conformance.doubles.divided import check_who_did_what, run_division
from conformance.doubles.division import GRPO, MATCHING, VLLM, typed
from conformance.doubles.instance import free_port
from conformance.doubles.started import HF, finish, in_time, journal_of, journals_of, keep, started, train_command
from conformance.gpu.greedy import answers
from conformance.gpu.peers import server_overrides
from conformance.judge.calls import Server
from conformance.tools.judge import judge
from rollmatch.model.vocabulary import split_at_stop

STEPS, NUM_ASKED = 60, 8
KEPT = os.environ.get("ROLLMATCH_TRACES")
"""A directory that journals are written to, to be committed and judged again on machines without GPUs."""


def overrides_for(out):
    return (
        f"training.output_dir={out}",
        f"training.max_steps={STEPS}",
        "training.save_steps=1000",
        "training.report_to=none",
        f"{VLLM}.kv_cache_memory_mib=1024",
    )


def eager(tensor):
    """Compiled engines of several GPUs first build flashinfer's all-reduce, for minutes and with sources of CUDA's."""
    return f"{VLLM}.enforce_eager={str(tensor > 1).lower()}"


def check_run(out, num_ranks):
    """It learnt, every rollout came from the newest weights, and the journal holds nothing that is forbidden."""
    per_rank = journals_of(out, num_ranks=num_ranks)
    trace = in_time(per_rank)
    if KEPT:
        keep(trace, Path(KEPT, f"{out.name}.jsonl"))
    assert judge(trace) == []
    assert [event["version"] for event in per_rank[0] if event["event"] == "synced"] == list(range(1, STEPS + 2))
    first, *_, last = [event["metrics"]["f1"] for event in per_rank[0] if event["event"] == "evaluated"]
    assert last > first + 0.05
    assert "NVIDIA" in trace[0]["device"]
    memory = [event["gpu_memory"] for event in per_rank[0] if event["event"] == "step"]
    assert all(figures["peak_gb"] > 0 and 0 <= figures["kept_layers"] <= figures["layers"] for figures in memory)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("sleep_level", [0, 1], ids=["awake", "asleep"])
def test_a_colocated_run_learns(tmp_path, sleep_level):
    out = tmp_path / f"colocate-{sleep_level}"
    overrides = (*overrides_for(out), f"{VLLM}.sleep_level={sleep_level}")
    code, text = finish(typed("train", CONFIG, "0", overrides), tmp_path / "learner.txt")
    assert code == 0, text[-3000:]
    check_run(out, 1)


@pytest.mark.gpu(2)
def test_a_process_that_sees_two_gpus_learns_on_the_first(tmp_path):
    """Without ``--gpus``: as people start their first run."""
    overrides = (*HF, f"training.output_dir={tmp_path / 'run'}", "training.max_steps=2", "training.eval_scenes=4")
    code, text = finish(train_command(*overrides), tmp_path / "learner.txt", CUDA_VISIBLE_DEVICES="0,1")
    assert code == 0, text[-3000:]
    assert [event["step"] for event in journal_of(tmp_path / "run", "step")] == [1, 2]


def fresh_answers(checkpoint):
    """Of an engine that reads the learner's last checkpoint, in a process that ends with it."""
    command = [sys.executable, "-m", "conformance.gpu.fresh_engine", str(checkpoint), str(NUM_ASKED)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [tuple(ids) for ids in json.loads(ended.stdout.splitlines()[-1])]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("tensor", [1, 2], ids=["an-engine-each", "one-engine-for-both"])
def test_two_colocated_ranks_learn(tmp_path, tensor):
    out = tmp_path / f"two-ranks-tp{tensor}"
    overrides = (
        *overrides_for(out),
        f"{VLLM}.tensor_parallel_size={tensor}",
        f"{VLLM}.sleep_level=1",
        eager(tensor),
        "training.per_device_train_batch_size=8",
    )
    code, text = finish(typed("train", CONFIG, "0,1", overrides), tmp_path / "learner.txt")
    assert code == 0, text[-3000:]
    check_run(out, 2)


CASES = {
    "one-and-one": ("0", "1", {"data": 1}),
    "tensor-parallel-and-one": ("0,1", "2", {"tensor": 2, "data": 1}),
    "three-and-one": ("0,1,2", "3", {"data": 3}),
    "two-and-two": ("0,1", "2,3", {"data": 2}),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("one-and-one", marks=pytest.mark.gpu(2)),
        pytest.param("tensor-parallel-and-one", marks=pytest.mark.gpu(3)),
        pytest.param("three-and-one", marks=pytest.mark.gpu(4)),
        pytest.param("two-and-two", marks=pytest.mark.gpu(4)),
    ],
)
def test_a_server_rolls_out_and_a_learner_learns(tmp_path, name):
    replicas, learners, sizes = CASES[name]
    out, port = tmp_path / name, free_port()
    overrides = (*overrides_for(out), *server_overrides([port], [free_port()], **sizes), eager(sizes.get("tensor", 1)))
    with started(typed("serve", CONFIG, replicas, overrides), tmp_path / "server.txt") as server:
        server.wait_healthy(f"http://127.0.0.1:{port}")
        code, text = finish(typed("train", CONFIG, learners, overrides), tmp_path / "learner.txt")
        assert code == 0, text[-3000:] + server.output()[-3000:]
        health = requests.get(f"http://127.0.0.1:{port}/health/", timeout=10).json()
        served = answers(Server(f"http://127.0.0.1:{port}"), NUM_ASKED)
    stop_ids = template_of().vocabulary.stop_ids
    assert [split_at_stop(ids, stop_ids)[0] for ids in served] == fresh_answers(out / f"checkpoint-{STEPS}")
    assert health["world_size"] == len(replicas.split(","))
    assert health["policy_version"] == STEPS + 1
    check_run(out, len(learners.split(",")))


@pytest.mark.scenario("topologies/one-optimizer-step-on-three-and-one", "topologies/one-optimizer-step-on-six-and-two")
@pytest.mark.parametrize(
    ("config", "replicas", "learners"),
    [
        pytest.param(MATCHING, "0,1,2", "3", marks=pytest.mark.gpu(4), id="three-and-one"),
        pytest.param(GRPO, "0,1", "2,3", marks=pytest.mark.gpu(4), id="two-and-two"),
        pytest.param(GRPO, "0,1,2,3,4,5", "6,7", marks=pytest.mark.gpu(8), id="six-and-two"),
    ],
)
def test_every_replica_and_every_rank_has_a_gpu_of_its_own(tmp_path, config, replicas, learners):
    """The run of ``scenarios/topologies`` on GPUs: three replicas on one GPU would pass all but the last line."""
    num_replicas, num_ranks = (len(numbers.split(",")) for numbers in (replicas, learners))
    memory = (f"{VLLM}.kv_cache_memory_mib=2048",)
    division = run_division(tmp_path, config, replicas=replicas, learners=learners, steps=20, settings=memory)
    check_who_did_what(division, num_replicas=num_replicas, num_ranks=num_ranks)
    assert judge(division.journal(num_ranks=num_ranks)) == []
    assert division.server_gpus == set(replicas.split(","))


@pytest.mark.gpu(3)
def test_two_servers_with_paired_ports_feed_one_learner(tmp_path):
    out, ports = tmp_path / "two-servers", [free_port(), free_port()]
    overrides = (*overrides_for(out), *server_overrides(ports, [free_port(), free_port()], data=1))
    first, second = (
        [*typed("serve", CONFIG, str(place), overrides), "--server", str(place)] for place in range(len(ports))
    )
    with started(first, tmp_path / "first.txt") as one, started(second, tmp_path / "second.txt") as two:
        code, text = finish(typed("train", CONFIG, "2", overrides), tmp_path / "learner.txt")
        assert code == 0, text[-3000:] + one.output()[-2000:] + two.output()[-2000:]
    check_run(out, 1)


def test_the_overrides_of_these_runs_are_good():
    """Known without a GPU, so that no GPU time is lost to a typing error."""
    from rollmatch.config import load_config

    for ports, sizes in (([8000], {"data": 3}), ([8000, 8001], {"data": 1}), ([8000], {"tensor": 2, "data": 1})):
        overrides = (*overrides_for("runs/x"), *server_overrides(ports, [51216, 51217][: len(ports)], **sizes))
        assert load_config(str(CONFIG), absolute(*overrides)).custom.extra.rollout_matching.vllm.mode == "server"
