"""Divisions of a machine by the commands people type: rollout replicas here, learner ranks there.

Three and one run rollout matching; six and two run GRPO with DoRA on all parts of the model.
"""

import json
import shlex

import pytest
from safetensors import safe_open

from conformance.doubles.digits import absolute
from conformance.doubles.divided import LEARNING, check_who_did_what, first_step, kinds_of, run_division
from conformance.doubles.division import GRPO, MATCHING, named
from conformance.tools.judge import judge
from rollmatch.cli.main import main

STEPS = 10


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three replicas and one learner, ten steps of rollout matching."""
    folder = tmp_path_factory.mktemp("three")
    brief = ("custom.extra.rollout_matching.max_new_tokens=48", "training.eval_scenes=2")
    split = {"replicas": "0,1,2", "learners": "3"}
    return run_division(folder, MATCHING, **split, steps=STEPS, lists_server=False, settings=brief)


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """Six replicas and two learner ranks, one step of GRPO."""
    folder = tmp_path_factory.mktemp("six")
    return run_division(folder, GRPO, replicas="0,1,2,3,4,5", learners="6,7", steps=1)


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.scenario(
    "topologies/one-optimizer-step-on-three-and-one",
    "rollout-backends/server-mode-starts-no-engine",
    "weight-sync/a-step-writes-no-weights-to-disk",
    clauses=[
        "topologies/three-rollout-gpus-and-one-learner-gpu-work-together#1,2,3,4",
        "rollout-server/a-rollout-server-only-generates#1,2",
        "rollout-backends/the-vllm-backend-offers-colocate-and-server-mode#5,6",
    ],
)
def test_three_replicas_only_generate_and_one_learner_only_learns(three):
    check_who_did_what(three, num_replicas=3, num_ranks=1)
    events = first_step(three.journal(num_ranks=1))
    assert [(each["version"], each["mode"]) for each in kinds_of(events, "synced")] == [(1, "full")]
    assert {each["policy_version"] for each in kinds_of(events, "generated")} == {1}
    assert len(kinds_of(events, "packed")) == 1
    assert {path.parts[0] for path in three.weight_files} == {f"checkpoint-{STEPS}"}, "weights went over the wire only"


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.scenario(clauses=["rollout-server/a-rollout-server-only-generates#1"])
def test_a_server_loads_nothing_that_learns(six):
    assert "rollmatch.server.replica" in six.server_modules
    assert not LEARNING & six.server_modules


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.scenario("topologies/three-and-one-on-a-laptop", clauses=["topologies/every-topology-runs-without-gpus#1"])
def test_ten_steps_each_learn_from_rollouts_of_their_own_version(three):
    assert three.code == 0
    events = three.journal(num_ranks=1)
    assert judge(events) == []
    synced = kinds_of(events, "synced")
    assert [(each["step"], each["version"], each["mode"]) for each in synced] == [
        (step, step + 1, "full") for step in range(STEPS + 1)
    ]
    written = [(e["step"], e["policy_version"]) for e in kinds_of(events, "generated") if e["purpose"] == "train"]
    assert written == [(step, step + 1) for step in range(STEPS)]
    assert [each["step"] for each in kinds_of(events, "step")] == list(range(1, STEPS + 1))
    assert three.health["policy_version"] == STEPS + 1
    assert [each["step"] for each in kinds_of(events, "finished")] == [STEPS]


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.scenario(
    "topologies/one-optimizer-step-on-six-and-two",
    clauses=[
        "topologies/six-rollout-gpus-and-two-learner-gpus-work-together#1",
        "rollout-backends/the-vllm-backend-offers-colocate-and-server-mode#7",
    ],
)
def test_six_replicas_generate_for_two_ranks_of_which_one_sends_weights(six):
    check_who_did_what(six, num_replicas=6, num_ranks=2)
    assert judge(six.journal(num_ranks=2)) == []
    for rank in (0, 1):
        synced = kinds_of(first_step(six.events(None, rank=rank)), "synced")
        assert [(each["step"], each["version"]) for each in synced] == [(0, 1)]
        assert (synced[0]["num_bytes"] > 0) == (rank == 0), "only rank 0 sends"
        assert [e["policy_version"] for e in six.events("generated", rank=rank) if e["purpose"] == "train"] == [1]
    assert six.num_calls("/native/communicator/") == 1
    num_syncs = six.num_calls("/native/sync/", "/native/sync/again/")
    assert num_syncs == len(six.events("synced")) == six.health["policy_version"]
    assert {path.parts[0] for path in six.weight_files} == {"checkpoint-1"}
    assert adapted_parts(six.out / "checkpoint-1") == {"vision", "aligner", "language"}


def adapted_parts(checkpoint):
    """Where adapters with a magnitude of their own are: DoRA."""
    with safe_open(checkpoint / "adapter_model.safetensors", "pt") as file:
        names = [name for name in file.keys() if "lora_magnitude_vector" in name]  # noqa: SIM118  # no mapping
    parts = (("aligner", "visual.merger"), ("vision", "visual.blocks"), ("language", "language_model"))
    return {part for part, infix in parts for name in names if infix in name}


@pytest.mark.scenario(clauses=["topologies/six-rollout-gpus-and-two-learner-gpus-work-together#2"])
@pytest.mark.parametrize(
    ("replicas", "learners"),
    [("0", "1"), ("0,1", "2,3"), ("0,1,2", "3"), ("0,1,2,3,4,5", "6,7")],
    ids=["one-and-one", "two-and-two", "three-and-one", "six-and-two"],
)
def test_one_file_makes_every_division_by_its_gpus_alone(capsys, monkeypatch, replicas, learners):
    monkeypatch.setattr("rollmatch.launch.rollout_server.has_gpu", lambda: True)
    sets = [part for override in absolute(*named(GRPO, 8080, 51216)) for part in ("--set", override)]
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
