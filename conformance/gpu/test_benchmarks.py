"""GPU benchmarks as far as a CPU can try them: the learner's forms, small, agree; settings of whole runs are good."""

import json

import pytest

from benchmarks.gpu import grpo_step, learner, six_and_two
from benchmarks.gpu.divided_run import DividedRun
from benchmarks.gpu.measure import judge, take_turns
from benchmarks.gpu.one_engine import EngineLoad
from conformance.doubles.digits import absolute
from conformance.doubles.division import GRPO


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    assert learner.main(["--tiny", "--rounds", "1", "--out", str(folder)]) == 0
    return {name: json.loads((folder / f"{name}-tiny.json").read_text()) for name in learner.PATHS}


def test_all_forms_of_the_masked_loss_agree(figures):
    for share in figures["masked_loss"]["shares"].values():
        losses = share["losses"]
        plain = losses["whole_logits_of_transformers"]
        assert [losses["ours"], losses["kept_logits"]] == pytest.approx([plain] * 2, rel=1e-5)
        assert all(len(one["samples_s"]) == 1 for one in share["measured"].values())


def test_all_ways_of_the_pass_have_one_loss_and_one_gradient(figures):
    packed = figures["packed_pass"]
    assert list(packed["losses"].values()) == pytest.approx([packed["losses"]["alone"]] * 4, rel=1e-5)
    assert (
        set(packed["measured"]) == set(packed["losses"]) == {"packed_segment_by_segment", "packed", "padded", "alone"}
    )
    assert max(packed["gradient_differences"].values()) < 1e-4


def test_hardware_and_versions_stand_beside_the_samples(figures):
    for one in figures.values():
        assert one["on"]["versions"]["torch"]
        assert one["on"]["gpu"] is None
        assert one["taken"].endswith("Z")


def test_without_a_gpu_only_tiny_runs(capsys, monkeypatch):
    monkeypatch.setattr(learner, "on_gpu", lambda: False)
    with pytest.raises(SystemExit) as caught:
        learner.main([])
    assert caught.value.code == 2
    assert "not testable: needs a GPU" in capsys.readouterr().err


def test_calls_take_turns_and_stop_when_time_is_over():
    order = []
    figures = take_turns({name: lambda name=name: order.append(name) for name in "ab"}, rounds=3, limit_s=60)
    assert order == list("aabb" + "ab" * 3)
    assert [len(one["samples_s"]) for one in figures.values()] == [3, 3]
    assert len(take_turns({"a": lambda: None}, rounds=9, limit_s=0)["a"]["samples_s"]) == 2


def test_a_bar_is_met_or_missed(capsys):
    bars = {}
    judge(bars, "fast", 5.0, at_least=5.0)
    judge(bars, "small", 6.0, at_most=5.0)
    assert [bar["met"] for bar in bars.values()] == [True, False]
    assert "MISSED small" in capsys.readouterr().out


@pytest.mark.wide
@pytest.mark.engine
def test_a_grpo_step_is_timed_by_phase_beside_a_server(tmp_path, monkeypatch):
    words = (
        "--rehearse",
        "--sides",
        "ours",
        "--cases",
        "lora-even:off,tokens-ahead",
        "full-even",
        "--results",
        str(tmp_path),
    )
    monkeypatch.setattr("sys.argv", ["grpo_step", *words])
    grpo_step.main()
    for kind in ("lora", "full"):
        sample = json.loads((tmp_path / f"grpo_step-{kind}.json").read_text())["samples"]["off"]
        assert sample["completions"] == grpo_step.TINY["num_prompts"] * grpo_step.TINY["num_generations"]
        assert len(sample["steps"]) == grpo_step.TINY["steps"]
        for step in sample["steps"]:
            assert 0 < step["rollout"] + step["learn"] <= step["step_s"]
            assert 0 < step["response_tokens"] < step["learn_tokens"]


@pytest.mark.parametrize("stage", ["small", "big"])
def test_the_settings_of_six_and_two_are_good(tmp_path, stage):
    """Known without a GPU, so that no GPU time is lost to a typing error."""
    from rollmatch.config import load_config

    overrides = {"small": six_and_two.SMALL, "big": (f"model.model={six_and_two.SUMMARY_MODEL}", *six_and_two.BIG)}
    for division in six_and_two.divisions_of(8):
        run = DividedRun(tmp_path / f"{stage}-{division}", division, steps=3, overrides=overrides[stage])
        config = load_config(str(GRPO), absolute(*run.overrides))
        assert config.training.max_steps == 3
        assert config.custom.extra.rollout_server.vllm_data_parallel_size == division.num_replicas
        assert config.tuner.use_dora


def test_one_engine_gets_what_a_replica_gets(tmp_path):
    run = DividedRun(tmp_path / "run", six_and_two.divisions_of(8)[0], steps=1, overrides=six_and_two.SMALL)
    arguments = six_and_two.engine_arguments(run)
    assert arguments["model"] == str(six_and_two.SUMMARY_MODEL)
    assert arguments["gpu_memory_utilization"] == 0.6
    assert arguments["max_model_len"] == 256


def test_a_machine_with_too_few_gpus_is_reported_at_once(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["six_and_two", "--gpus", "4"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit) as caught:
        six_and_two.main()
    assert caught.value.code == 2
    assert "not testable: needs 4 GPUs, has 1" in capsys.readouterr().err


def test_a_load_never_asks_the_same_twice():
    load = EngineLoad(num_requests=2, prompt_len=3, response_len=4, first_id=10, last_id=99)
    assert load.prompts(0) == load.prompts(0) != load.prompts(1)
    assert len(load.prompts(0, times=3)) == 6
    assert {len(ids) for ids in load.prompts(0)} == {3}
    assert all(10 <= id_ <= 99 for ids in load.prompts(5, times=50) for id_ in ids)
    assert load.num_tokens == 8
