"""A policy that is taught by an exponential average of its weights."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conformance.doubles.configs import config_with, refusal_of
from conformance.doubles.distilled import (
    CONFIG,
    DISTILL,
    DIVERGENCE,
    MODEL,
    PROMPTED,
    asked,
    logprobs_of,
    make_trainer,
    samples,
)
from conformance.doubles.distilled import steps_of as figures_of
from conformance.doubles.refusals import refused
from conformance.doubles.small_run import events, weights_of
from rollmatch.cli.main import main

AVERAGE = PROMPTED.replace(f"model: {MODEL}", "self: true, average: 0.75")
STEPS = (
    "training.max_steps=3",
    "training.save_steps=1",
    "training.save_total_limit=null",
    "training.learning_rate=0.001",
)
TUNERS = {"full": (), "lora": ("tuner.train_type=lora", "tuner.lora_rank=4", "training.learning_rate=0.05")}


def averaged(folder):
    """The model with 3/4 of the weights as saved and 1/4 of those of the first checkpoint."""
    model, after = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), load_file(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.lerp_(after[name], 0.25)
    return model


@pytest.mark.scenario(
    "distillation/the-average-of-two-steps",
    clauses=["distillation/a-policy-may-be-taught-by-an-average-of-itself#1"],
)
def test_the_average_of_two_steps(tmp_path):
    trainer = make_trainer(tmp_path, AVERAGE, *DIVERGENCE, *STEPS, "training.max_steps=2")
    trainer.train()
    (ids,) = [event["sample_ids"] for event in events(trainer, "requested") if event["step"] == 1]
    teacher, by_id, found = averaged(tmp_path / "checkpoint-1/model.safetensors"), {}, []
    by_id = {sample.sample_id: sample for sample in samples()}
    for sample_id, rollout in zip(ids, trainer.report.rollouts, strict=True):
        prompt = asked(trainer.source.template, by_id[sample_id], "{question} {sum}")
        with torch.no_grad():
            rows = logprobs_of(teacher, prompt, rollout.sampled_ids)
        found.append(rows.gather(-1, torch.tensor(rollout.sampled_ids)[:, None]))
    assert figures_of(trainer)[1]["teacher_logprob"] == pytest.approx(torch.cat(found).mean().item(), rel=1e-5)
    policy = weights_of(trainer.model)
    after = load_file(tmp_path / "checkpoint-2/model.safetensors")
    assert all(torch.equal(policy[name], weight) for name, weight in after.items() if name in policy)


@pytest.mark.scenario(clauses=["distillation/a-policy-may-be-taught-by-an-average-of-itself#2"])
@pytest.mark.parametrize("tuner", TUNERS)
def test_a_resumed_run_has_the_average_of_a_whole_one(tmp_path, tuner):
    whole = make_trainer(tmp_path, AVERAGE, *DIVERGENCE, *STEPS, *TUNERS[tuner])
    whole.train()
    again = make_trainer(tmp_path, AVERAGE, *DIVERGENCE, *STEPS, *TUNERS[tuner])
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    ours, theirs = weights_of(whole.model), weights_of(again.model)
    assert all(torch.equal(theirs[name], weight) for name, weight in ours.items())
    assert figures_of(again)[-1]["teacher_kl"] == figures_of(whole)[-1]["teacher_kl"]
    (tmp_path / "checkpoint-1/average-0.safetensors").unlink()
    lost = make_trainer(tmp_path, AVERAGE, *DIVERGENCE, *STEPS, *TUNERS[tuner])
    with refused("average-missing"):
        lost.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.scenario(
    "distillation/a-checkpoint-is-evaluated-with-its-average",
    clauses=["distillation/a-policy-may-be-taught-by-an-average-of-itself#3"],
)
@pytest.mark.parametrize("tuner", TUNERS)
def test_a_checkpoint_is_evaluated_with_its_average(tmp_path, tuner, capsys):
    run = tmp_path / "run"
    of_run = (
        *(AVERAGE, *DIVERGENCE, *STEPS, *TUNERS[tuner], "training.max_steps=2", "training.eval_scenes=8"),
        *("custom.extra.rollout_matching.decoding.temperature=0.7", f"training.output_dir={run}"),
    )
    sets = [part for one in (*DISTILL, *of_run) for part in ("--set", one)]
    assert main(["train", str(CONFIG), *sets]) == 0
    whole = json.loads((run / "evaluations/step-000002.json").read_text())
    rows = len(whole["sample_ids"])
    found = {}
    for name, overrides in (("run", ()), ("present weights", (AVERAGE.replace(", average: 0.75", ""),))):
        sets = [part for one in overrides for part in ("--set", one)]
        assert main(["eval", str(run), "--limit", str(rows), "--out", str(tmp_path / name), *sets]) == 0
        found[name] = json.loads((tmp_path / name / "eval.json").read_text())
    ours, others = found["run"], found["present weights"]
    assert (ours["teachers"], others["teachers"]) == (
        ["average of checkpoint-2 that keeps 0.75"],
        ["the evaluated weights"],
    )
    assert "teacher 0: average of checkpoint-2 that keeps 0.75\n" in capsys.readouterr().out
    assert ours["sample_ids"] == whole["sample_ids"]
    expected = whole["metrics"]["teacher_logprob"]
    assert ours["metrics"]["teacher_logprob"] == pytest.approx(expected, rel=1e-5)
    assert others["metrics"]["teacher_logprob"] != pytest.approx(expected, rel=1e-3)


def test_an_average_that_keeps_all_is_the_policy_before_training(tmp_path):
    kept = AVERAGE.replace("0.75", "1")
    runs = [make_trainer(tmp_path / name, given, *DIVERGENCE, *STEPS) for name, given in (("a", PROMPTED), ("b", kept))]
    for trainer in runs:
        trainer.train()
    frozen, own = ([step["teacher_kl"] for step in figures_of(trainer)] for trainer in runs)
    assert own == pytest.approx(frozen, rel=1e-5)


@pytest.mark.scenario(clauses=["distillation/a-policy-may-be-taught-by-an-average-of-itself#4"])
@pytest.mark.parametrize(
    ("teacher", "more", "code"),
    [
        ("model: a", (), "teacher-average-of-another"),
        ("base_url: 'http://h:1'", (), "teacher-average-of-another"),
        ("self: true", ("training.strategy=fsdp2",), "teacher-average-in-parts"),
    ],
)
def test_an_average_that_nobody_keeps_is_refused(teacher, more, code):
    distill = ("custom.trainer_variant=distill", "~.decoding.temperature=1")
    key = "custom.extra.distill.teachers"
    one = f"{key}=[{{{teacher}, prompt: a, average: 0.9}}]"
    assert refusal_of(*distill, one, *more) == (code, f"{key}.0.average")
    assert config_with(*distill, f"{key}=[{{self: true, prompt: a, average: 0.9}}]")
