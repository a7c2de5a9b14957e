"""Checkpoints of ranks that share the policy in parts: continued by as many ranks and by others, and exported."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from conformance.doubles import small_run
from conformance.doubles.digits import load_digits, write_cut
from conformance.doubles.refusals import refused
from conformance.doubles.started import finish_ranks
from rollmatch.model.source import local_directory
from rollmatch.rollout.open_groups import GROUPS_FILE
from rollmatch.run.export import load_trained
from rollmatch.training.checkpoint import SavedLearner, find_damage
from rollmatch.training.checkpointer import saved_learner
from rollmatch.training.packer_state import PACKER_STATE_FILE

WORKER = ("-m", "conformance.doubles.ddp_worker", "digits")
KINDS = {"full": (), "adapters": ("tuner.train_type=lora", "tuner.lora_rank=2")}
STEPS = (
    *("training.strategy=fsdp2", "training.max_steps=2", "training.learning_rate=0.01", "training.optim=adamw_torch"),
    *("custom.extra.rollout_matching.max_new_tokens=8", "training.save_total_limit=null", "training.packing=false"),
)


def run(folder, *overrides, num_ranks=2, **variables):
    """One rank of which writes its weights, whole, and its losses."""
    folder.mkdir()
    words = (str(folder), *STEPS, f"training.per_device_train_batch_size={6 // num_ranks}", *overrides)
    finish_ranks(folder, num_ranks, sys.executable, *WORKER, *words, **variables)
    return load_file(folder / "rank0.safetensors"), json.loads((folder / "rank0.json").read_text())["losses"]


def distance(one, other):
    return torch.cat([(one[name] - other[name]).flatten() for name in one]).norm().item()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model of few layers: what is compared is what is written of them, at any depth."""
    return f"model.model={write_cut(tmp_path_factory.mktemp('model') / 'cut')}"


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.scenario(
    "learner-ranks/a-split-checkpoint-is-continued-by-other-ranks",
    clauses=["learner-ranks/a-run-continues-with-the-same-steps-or-not-at-all#1,2"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_split_checkpoint_is_continued_and_exported(kind, small, tmp_path):
    fields = (small, *KINDS[kind])
    whole, losses = run(tmp_path / "whole", *fields, "training.save_steps=1")
    first, last = (tmp_path / f"whole/checkpoint-{step}" for step in (1, 2))
    assert not find_damage(first)
    same, again = run(tmp_path / "same", *fields, CHECKPOINT=str(first))
    assert again == losses  # the first is the checkpoint's
    assert all(torch.equal(same[name], weight) for name, weight in whole.items())
    others, theirs = run(tmp_path / "others", *fields, num_ranks=3, CHECKPOINT=str(first))
    assert theirs == pytest.approx(again, rel=1e-4)
    before = load_trained(load_digits(*small_run.SMALL, *fields), first)
    started = {name: weight.detach() for name, weight in before.named_parameters()}
    step = distance(whole, started)
    assert step > 0
    assert distance(others, whole) < 1e-2 * step  # Adam's first steps divide by small numbers
    exported = load_trained(load_digits(*small_run.SMALL, *fields), last)
    assert all(torch.equal(weight, whole[name]) for name, weight in exported.named_parameters())
    with refused("model-in-parts", key="model.model", remedy="rollmatch export"):
        local_directory(str(tmp_path / "whole"), revision=None, key="model.model")


SAVED = SavedLearner(learner_world_size=2, samples_per_step=512, strategy="fsdp2")


@pytest.mark.scenario(
    "learner-ranks/another-batch-is-refused",
    clauses=["learner-ranks/a-run-continues-with-the-same-steps-or-not-at-all#3"],
)
@pytest.mark.parametrize(
    ("world_size", "samples", "strategy", "key", "problem"),
    [
        (4, 1024, "fsdp2", "training.per_device_train_batch_size", "512 samples per step, this run has 1024"),
        (1, 4, "ddp", "training.strategy", "fsdp2, this run has ddp"),
    ],
)
def test_another_batch_or_strategy_is_refused_with_both_numbers(world_size, samples, strategy, key, problem, tmp_path):
    SAVED.write(tmp_path)
    SavedLearner(learner_world_size=4, samples_per_step=512, strategy="fsdp2").check(tmp_path)
    with refused("resume-other-learner", key=key, problem=problem):
        SavedLearner(learner_world_size=world_size, samples_per_step=samples, strategy=strategy).check(tmp_path)


@pytest.mark.parametrize("name", [PACKER_STATE_FILE, GROUPS_FILE])
def test_what_waits_on_ranks_needs_these_ranks(tmp_path, name):
    SAVED.write(tmp_path)
    (tmp_path / name.format(rank=1)).touch()
    SAVED.check(tmp_path)
    with refused("resume-other-learner", key="--gpus", problem="2 learner ranks, this run has 4"):
        SavedLearner(learner_world_size=4, samples_per_step=512, strategy="fsdp2").check(tmp_path)


@pytest.mark.parametrize(
    ("settings", "strategy"), [({}, "ddp"), ({"fsdp": True}, "fsdp2"), ({"deepspeed": "zero.json"}, "deepspeed")]
)
def test_what_a_checkpoint_says_of_its_learner(settings, strategy):
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5}
    arguments = SimpleNamespace(**{"fsdp": None, "deepspeed": None} | sizes | settings)
    expected = SavedLearner(learner_world_size=2, samples_per_step=30, strategy=strategy)
    assert saved_learner(arguments, 2) == expected


def test_a_checkpoint_of_an_older_version_is_continued(tmp_path):
    SAVED.check(tmp_path)
