"""``RolloutTrainer`` from Python, without the command line: it trains over epochs, saves and resumes by itself."""

import pytest
import torch

from conformance.doubles.digits import scenes
from conformance.doubles.refusals import refused
from conformance.doubles.small_run import events, make_trainer, requested, weights_of

RUN = (
    *("training.packing=true", "global_max_length=240", "training.per_device_train_batch_size=2"),
    *("training.max_steps=7", "training.save_steps=5", "training.save_total_limit=9"),
    "custom.extra.rollout_matching.max_new_tokens=8",
)
"""Steps of 2, 2 and 1 samples make an epoch of 5; step 5 is the last one of the second epoch. Some segments wait."""


def trained(folder, **resume):
    trainer = make_trainer(folder, *RUN, samples=scenes("train")[:5], is_shallow=True)
    trainer.train(**resume)
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return trained(folder), folder


def test_each_epoch_has_all_samples_in_an_order_of_its_own(whole):
    trainer, _ = whole
    ids = requested(trainer)
    first, second = ids[:5], ids[5:10]
    assert sorted(first) == sorted(second) == list(range(5))
    assert first != second


def test_a_run_resumed_in_mid_epoch_learns_what_it_would_have_learnt(whole, tmp_path):
    trainer, folder = whole
    resumed = trained(tmp_path, resume_from_checkpoint=str(folder / "checkpoint-5"))
    ours, theirs = ([event["sample_ids"] for event in events(one, "packed")] for one in (resumed, trainer))
    assert ours == theirs[5:]
    assert events(trainer, "packed")[4]["carried"] > 0, "segments waited in the checkpoint"
    found, expected = weights_of(resumed.model), weights_of(trainer.model)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_what_another_learner_saved_is_refused(whole, tmp_path):
    _, folder = whole
    other = make_trainer(tmp_path, *RUN, "training.per_device_train_batch_size=1", samples=scenes("train")[:5])
    with refused("resume-other-learner", "training.per_device_train_batch_size"):
        other.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
