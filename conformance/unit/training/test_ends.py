"""Runs that have nothing left to learn, or nothing left to learn with."""

import dataclasses
import pickle
import shutil
import struct

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import save
from transformers import TrainerCallback

from conformance.doubles.harmful_models import Harmful
from conformance.doubles.refusals import refused
from conformance.doubles.small_run import events, make_trainer
from rollmatch.model.source import SPLIT
from rollmatch.model.split_checkpoint import check_parts, read_split
from rollmatch.ranks import Ranks
from rollmatch.run.callbacks import RunWatcher
from rollmatch.training.checkpoint import write_manifest


def watched(folder, *overrides):
    trainer = make_trainer(folder, "training.save_steps=1", *overrides, is_shallow=True)
    watcher = RunWatcher(None, min_fill=None)
    watcher.trainer = trainer
    trainer.add_callback(watcher)
    return trainer, watcher


def test_a_run_that_is_resumed_at_its_end_learns_nothing_more(tmp_path):
    for checkpoint in (None, str(tmp_path / "checkpoint-1")):
        trainer, _ = watched(tmp_path)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step == 1
        assert len(events(trainer, "step")) == 1
    trainer.evaluate()


def test_a_loss_that_is_no_number_ends_the_run_before_its_weights_are_saved(tmp_path):
    trainer, _ = watched(tmp_path, "training.max_steps=3", "training.learning_rate=1e30", "training.max_grad_norm=0")
    with refused(
        "loss-not-finite", "training.learning_rate", problem="step 2", remedy="Start a new run from the last checkpoint"
    ):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


class SpoilsAWeight(TrainerCallback):
    """The second optimizer step leaves one number that is none, after a loss that is one."""

    def __init__(self, number):
        self.number = number

    def on_step_end(self, args, state, control, model, **others):
        if state.global_step == 2:
            weight = next(weight for weight in model.parameters() if weight.requires_grad)
            weight.data.view(-1)[0] = self.number


@pytest.mark.scenario(clauses=["weight-sync/a-wrong-update-is-refused-and-named#7"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_no_numbers_end_the_run_before_they_are_saved(tmp_path, number):
    trainer, _ = watched(tmp_path, "training.max_steps=3")
    trainer.add_callback(SpoilsAWeight(number))
    with refused("policy-not-finite", "training.learning_rate", problem="holds NaN or infinity after step 2"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


BREAKS = {
    "optimizer.pt": ["harmful", b"", b"half", "tensor"],
    "scheduler.pt": ["harmful", b"", "tensor"],
    "rng_state.pth": ["harmful", b"half", "tensor"],
    "model.safetensors": [b"", struct.pack("<Q", 2**40) + b"{}"],
    "trainer_state.json": [
        b"{",
        b"[]",
        b'{"global_step": "x"}',
        b'{"log_history": 7}',
        b"[" * 100_000,
    ],
    "learner.json": [b"{}", b"\xff"],
}
"""File of a checkpoint -> what a stranger leaves in its place."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    watched(folder)[0].train()
    return folder / "checkpoint-1"


@pytest.mark.parametrize(("name", "content"), [(name, each) for name, all_of in BREAKS.items() for each in all_of])
def test_a_foreign_file_in_a_checkpoint_is_named_and_not_run(saved, tmp_path, name, content):
    checkpoint = tmp_path / saved.name
    shutil.copytree(saved, checkpoint)
    if isinstance(content, bytes):
        (checkpoint / name).write_bytes(content)
    else:
        torch.save(Harmful(tmp_path / "mark") if content == "harmful" else torch.zeros(3), checkpoint / name)
    write_manifest(checkpoint)
    with refused("checkpoint-unreadable", "--resume", problem="a file of checkpoint-1"):
        watched(tmp_path, "training.max_steps=2")[0].train(resume_from_checkpoint=str(checkpoint))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("place", ["description", "values"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint")
def test_parts_of_a_foreign_checkpoint_are_named_and_not_run(saved, tmp_path, place):
    """torch unpickles both, whatever they name."""
    checkpoint, policy = tmp_path / saved.name, nn.Linear(2, 2)
    shutil.copytree(saved, checkpoint)
    values = {"model": policy.state_dict(), "rate": 0.5}
    save(values, checkpoint_id=checkpoint / SPLIT, no_dist=True)
    check_parts(checkpoint)
    assert torch.equal(read_split(nn.Linear(2, 2), checkpoint).weight, policy.weight)
    if place == "values":
        save(values | {"rate": Harmful(tmp_path / "mark")}, checkpoint_id=checkpoint / SPLIT, no_dist=True)
    else:
        (checkpoint / SPLIT / ".metadata").write_bytes(pickle.dumps(Harmful(tmp_path / "mark")))
    write_manifest(checkpoint)
    with refused("checkpoint-unreadable", "--resume", problem="a file of checkpoint-1"):
        watched(tmp_path, "training.max_steps=2")[0].train(resume_from_checkpoint=str(checkpoint))
    with pytest.raises(pickle.UnpicklingError):
        read_split(policy, checkpoint)
    assert not (tmp_path / "mark").exists()


class OneRankHasNoNumber(Ranks):
    """Rank 0 of two; the other one says what this one says, and that its loss is no number."""

    def gather(self, item):
        return [item, (False, "") if item == (True, "") else item]

    def barrier(self):
        pass

    def sum(self, numbers):
        return list(numbers)


def test_all_ranks_end_where_the_loss_of_one_is_no_number(tmp_path):
    trainer = make_trainer(tmp_path, "training.save_steps=1")
    ranks = OneRankHasNoNumber(rank=0, learner_world_size=2)
    trainer.source.fence.ranks = ranks
    trainer.source = trainer.overlap.source = dataclasses.replace(trainer.source, ranks=ranks)
    with refused("loss-not-finite", "training.learning_rate", problem="step 1"):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))
