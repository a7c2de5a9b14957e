"""Capabilities ``determinism`` and ``data-ownership``, scenario by scenario; what needs a server is pending."""

import pytest

from conformance.doubles.digits import scenes
from conformance.doubles.small_run import events, make_trainer
from rollmatch.run.callbacks import RunWatcher


def run(folder, *overrides):
    trainer = make_trainer(
        folder,
        "training.seed=7",
        "training.max_steps=3",
        "training.per_device_train_batch_size=2",
        "custom.extra.rollout_matching.max_new_tokens=7",
        *overrides,
        samples=scenes("train")[:4],
        is_shallow=True,
    )
    watcher = RunWatcher(None, min_fill=None)
    watcher.trainer = trainer
    trainer.add_callback(watcher)
    return trainer


def recorded(trainer, *fields):
    return [[event[field] for field in fields] for event in events(trainer, "requested")]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    trainer = run(folder, "training.save_steps=1", "training.save_total_limit=null")
    trainer.train()
    return trainer, folder


@pytest.mark.scenario(
    "determinism/two-runs-agree",
    clauses=[
        "determinism/the-same-seed-gives-the-same-order-and-the-same-requests#1,2,3",
        "determinism/every-request-has-a-seed-of-its-own#4",
        "observability/rollouts-can-be-audited#1",
    ],
)
def test_two_runs_agree(first, tmp_path):
    trainer, _ = first
    second = run(tmp_path)
    second.train()
    fields = ("step", "sample_ids", "seeds", "decoding")
    assert recorded(second, *fields) == recorded(trainer, *fields)
    assert len(recorded(trainer, "step")) == 3
    assert [len(seeds) for (seeds,) in recorded(trainer, "seeds")] == [2, 2, 2]
    assert all(seed > 0 for (seeds,) in recorded(trainer, "seeds") for seed in seeds)
    assert [r.response_token_ids for r in second.report.rollouts] == [
        r.response_token_ids for r in trainer.report.rollouts
    ]


@pytest.mark.scenario(
    "data-ownership/a-killed-run-goes-on-where-it-was",
    clauses=["data-ownership/the-learner-owns-the-order-of-the-data#4"],
)
def test_a_resumed_run_goes_on_with_the_next_sample(first, tmp_path):
    """Four samples, two a step: the second step is in the middle of an epoch, the third in the next one."""
    trainer, folder = first
    resumed = run(tmp_path)
    # the trainer itself notices samples that are not the learner's
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert recorded(resumed, "step", "sample_ids") == recorded(trainer, "step", "sample_ids")[1:]
    assert recorded(trainer, "sample_ids")[2] != recorded(trainer, "sample_ids")[0]
    assert sorted(recorded(trainer, "sample_ids")[0][0] + recorded(trainer, "sample_ids")[1][0]) == list(range(4))
