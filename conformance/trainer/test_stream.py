"""A step that streams, for real: the digits model learns from each part as it comes, a copy of it writes them."""

import threading
from itertools import chain

import pytest

from conformance.trainer.overlapped import overlapped
from conformance.trainer.small_run import events, step_between, weights_of
from rollmatch.training.streaming import StreamedStep

LONG_STEP = "training.learning_rate=1"
FOUR_PARTS = (
    *("training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=4"),
    "custom.extra.rollout_matching.max_new_tokens=16",
)
PATIENCE_S = 60


def learnt(trainer):
    """Sample ids by optimizer step."""
    return {event["step"]: sorted(chain(*event["sample_ids"])) for event in events(trainer, "packed")}


def step_of(folder, mode, *overrides, prepare=lambda trainer, servers: None):
    trainer, servers = overlapped(folder, mode, LONG_STEP, *overrides, is_shallow=True)
    prepare(trainer, servers)
    before = weights_of(trainer.model)
    trainer.train()
    return trainer, step_between(before, weights_of(trainer.model))


def hold_back_the_last(trainer, servers):
    """One call is not answered before two micro-batches of its step were learnt from, or the learner waits for it."""
    held, seen = threading.Event(), []
    learn, ask = trainer.training_step, trainer.overlap.prefetch.next_part

    def counted(model, inputs, totals=None):
        loss = learn(model, inputs, totals)
        seen.append(trainer.totals is None)
        trainer.num_kept.append(trainer.streamed.early.num_kept)
        if len(seen) == 2:
            held.set()
        return loss

    def asked(step, *, taken):
        if len(taken) == 3:
            held.set()
        return ask(step, taken=taken)

    trainer.training_step, trainer.learnt_early, trainer.num_kept = counted, seen, []
    trainer.overlap.prefetch.next_part = asked
    lock, calls = threading.Lock(), []

    def wait(server, ids):
        with lock:
            calls.append(ids)
            is_last = len(calls) == 4
        assert not is_last or (held.wait(PATIENCE_S) and len(seen) >= 2)

    servers.before_call = wait


@pytest.fixture(scope="module")
def without_overlap(tmp_path_factory):
    return step_of(tmp_path_factory.mktemp("off"), "off", *FOUR_PARTS)


@pytest.mark.scenario(
    "prefetch/stream-mode-learns-what-off-mode-learns", clauses=["prefetch/overlap-is-chosen-in-yaml#2,3"]
)
def test_a_streamed_step_learns_early_and_has_the_gradient_of_any_other(tmp_path, without_overlap):
    reference, expected = without_overlap
    trainer, step = step_of(tmp_path, "stream", *FOUR_PARTS, prepare=hold_back_the_last)
    assert trainer.learnt_early[:2] == [True, True], (
        "two micro-batches are learnt from before the last rollout is there"
    )
    assert trainer.learnt_early[-1] is False
    assert (step - expected).norm() < 1e-5 * expected.norm()
    ours, theirs = (each.state.log_history[0] for each in (trainer, reference))
    for name in ("loss", "loss_ce", "loss_coord", "recall", "segments", "learn_tokens", "rollout_tokens"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
    assert learnt(trainer) == learnt(reference)
    whole = [event for event in reference.source.fence.backend.events if event[0] != "sync"]
    assert [(kind, len(ids)) for kind, _, ids in whole] == [("whole", 4)], "off mode waits for the whole step"


@pytest.mark.parametrize(("override", "num_kept"), [("graphs_kept=1", [1, 1]), ("graphs_kept=2", [1, 2])])
def test_graphs_that_are_kept_until_their_step_is_whole_give_the_gradient_of_any_other(
    tmp_path, without_overlap, override, num_kept, monkeypatch
):
    monkeypatch.setattr(StreamedStep, "work_ahead", lambda step: False)
    reference, expected = without_overlap
    kept = f"custom.extra.rollout_matching.{override}"
    trainer, step = step_of(tmp_path, "stream", *FOUR_PARTS, kept, prepare=hold_back_the_last)
    assert trainer.learnt_early[:2] == [True, True]
    assert trainer.num_kept[:2] == num_kept, "the first is spent before the second is made, where one may be kept"
    assert trainer.num_kept[-1] == 0
    assert (step - expected).norm() < 1e-5 * expected.norm()
    losses = [each.state.log_history[0]["loss"] for each in (trainer, reference)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
