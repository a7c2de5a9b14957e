"""GRPO whose completions are asked for while it learns, for real: a copy of the model in other threads writes."""

import threading
import time
from itertools import chain

import pytest

from conformance.doubles.digits import scenes, unseen
from conformance.doubles.overlapped import (
    forget_between_steps,
    ids_learnt,
    in_order_of_time,
    note_what_is_learnt,
    overlapped,
)
from conformance.doubles.small_run import events, step_between, weights_of

GRPO = (
    "custom.trainer_variant=grpo",
    "custom.extra.grpo.num_generations=3",
    "custom.extra.grpo.rewards=[{function: conformance.doubles.rewards:digit_sum}]",
    "custom.extra.rollout_matching.decoding.temperature=1",
    "custom.extra.rollout_matching.max_new_tokens=16",
    "training.per_device_train_batch_size=1",
    "training.packing=false",
    "training.learning_rate=0.3",
    "training.max_steps=4",
)
WINDOW = ("custom.extra.grpo.num_iterations=2", "custom.extra.grpo.steps_per_generation=2", "training.max_steps=9")
SAMPLES, HELD_OUT = scenes("train")[:8], scenes()[:1]
SHALLOW = {"is_shallow": True, "samples": unseen(SAMPLES), "eval_samples": unseen(HELD_OUT)}
"""Where the policy's log-probabilities do not matter: it would write much that no engine may."""


def ran(folder, mode, *overrides, prepare=lambda trainer, servers: None, **cut):
    given = {"samples": SAMPLES, "eval_samples": HELD_OUT} | cut
    trainer, servers = overlapped(folder, mode, *GRPO, *overrides, **given)
    note_what_is_learnt(trainer)
    prepare(trainer, servers)
    trainer.train()
    if trainer.overlap.prefetch is not None:
        trainer.overlap.prefetch.close()
    return trainer


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return {mode: ran(tmp_path_factory.mktemp(mode), mode) for mode in ("off", "ahead")}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Nine optimizer steps in windows of four, with checkpoints."""
    folder = tmp_path_factory.mktemp("windowed")
    kept = (*WINDOW, "training.save_steps=1", "training.save_total_limit=9")
    return ran(folder, "ahead", *kept, max_staleness=4, lead=1, **SHALLOW), folder


@pytest.mark.scenario(clauses=["prefetch/grpo-requests-completions-a-window-ahead#2"])
def test_groups_come_in_the_order_of_off_with_the_same_seeds(pair):
    off, ahead = pair["off"], pair["ahead"]
    assert ids_learnt(ahead) == ids_learnt(off)
    assert all(len(set(ids)) == 1 and len(ids) == 3 for ids in ids_learnt(ahead)), "a group is learnt from at once"
    seeds = {mode: {e["step"]: e["seeds"] for e in events(trainer, "requested")} for mode, trainer in pair.items()}
    assert seeds["ahead"] == seeds["off"]
    logged = {mode: [event["step"] for event in events(trainer, "completions")] for mode, trainer in pair.items()}
    assert logged["ahead"] == logged["off"] != []
    order = in_order_of_time(ahead, "requested", "packed")
    assert order.index(("requested", 1)) < order.index(("packed", 0)), "requested before step 0 is learnt"


def test_the_log_has_how_old_completions_are_and_how_far_the_policy_has_moved_since(pair):
    lines = [line for line in pair["ahead"].state.log_history if "loss" in line]
    ages = [{name: line[name] for name in line if name.startswith("staleness/")} for line in lines]
    assert ages == [{"staleness/0": 3.0}, *[{"staleness/1": 3.0}] * 3]
    assert lines[0]["drift"] < 1e-4
    assert max(line["drift"] for line in lines[1:]) > 1e-3
    assert all(line["drift"] < 1e-4 for line in pair["off"].state.log_history if "loss" in line)


def test_the_correction_starts_from_the_weights_that_wrote(pair):
    """A rollout that is as old as its sampler's log-probabilities: these differ from the learner's own."""
    for place, (version, segments) in enumerate(pair["ahead"].learnt):
        assert {segment.policy_version for segment in segments} == {version - min(place, 1)}
        assert all(len(segment.policy.sampler_logprobs) == segment.train_len for segment in segments)
        assert {segment.policy.old_logprobs for segment in segments} == {None}, "the ratio is to the step's own policy"


def test_what_became_too_old_is_requested_again_in_its_place(pair, tmp_path):
    trainer = ran(tmp_path, "ahead", "training.eval_steps=1", prepare=forget_between_steps, lead=2, **SHALLOW)
    assert events(trainer, "asked_again")
    assert ids_learnt(trainer) == ids_learnt(pair["off"])
    assert max(trainer.ages) == 1


@pytest.mark.scenario(
    "prefetch/windows-of-four-optimizer-steps", clauses=["prefetch/grpo-requests-completions-a-window-ahead#1"]
)
def test_the_next_window_is_requested_while_all_steps_of_this_one_are_learnt(tmp_path):
    off = ran(tmp_path / "off", "off", *WINDOW, **SHALLOW)
    ahead = ran(tmp_path / "ahead", "ahead", *WINDOW, max_staleness=4, lead=1, **SHALLOW)
    assert ids_learnt(ahead) == ids_learnt(off)
    order = in_order_of_time(ahead, "requested", "packed")
    assert order.index(("requested", 4)) < order.index(("packed", 0)) < order.index(("requested", 8))
    assert order.index(("requested", 8)) < order.index(("packed", 4))
    assert [event["step"] for event in events(ahead, "synced")] == [0, 4, 8]
    ages = [version - segments[0].policy_version for version, segments in ahead.learnt]
    assert ages == [0] * 4 + [1] * 5
    logged = [{name for name in line if name.startswith("staleness/")} for line in ahead.state.log_history]
    assert [*chain(*logged)][:5:4] == ["staleness/0", "staleness/4"], "weights of four optimizer steps before"
    ids = [chain.from_iterable(event["sample_ids"]) for event in events(ahead, "packed")[:4]]
    assert sorted(chain(*ids)) == sorted(2 * events(ahead, "requested")[0]["sample_ids"])


@pytest.mark.scenario(
    clauses=[
        "prefetch/prefetch-does-not-change-the-order-of-the-data#2",
        "prefetch/grpo-requests-completions-a-window-ahead#2",
    ]
)
@pytest.mark.parametrize("done", [1, 3, 4])
def test_a_run_that_continues_requests_and_learns_what_it_would_have(windowed, tmp_path, done):
    """From after the first or before the last step of a window, and from its end: the next one, under way, is lost."""
    whole, folder = windowed
    overrides = (*GRPO, *WINDOW)
    rest, _ = overlapped(tmp_path, "ahead", *overrides, max_staleness=4, lead=1, **SHALLOW)
    checkpoint = folder / f"checkpoint-{done}"
    rest.train(resume_from_checkpoint=str(checkpoint))
    learnt, rest_learnt = ([event["sample_ids"] for event in events(run, "packed")] for run in (whole, rest))
    assert len(learnt) == 9
    assert rest_learnt == learnt[done:]
    seeds, again = ({event["step"]: event["seeds"] for event in events(run, "requested")} for run in (whole, rest))
    assert again == {step: seeds[step] for step in again}
    assert {4, 8} == again.keys(), "what was under way is requested again"


PATIENCE_S = 60


def busy_until_an_evaluation(trainer, servers):
    """Of the second window each server has one call under way, and two in line, when an evaluation begins."""
    begun, evaluate = threading.Event(), trainer.evaluate
    first = {trainer.train_dataset[index].sample_id for index in trainer.plan.at(0).sample_indices}

    def wait(server, ids):
        if not first.issuperset(ids):
            assert begun.wait(PATIENCE_S)
            time.sleep(0.3)

    def begun_first(*arguments, **named):
        begun.set()
        return evaluate(*arguments, **named)

    servers.before_call, trainer.evaluate = wait, begun_first


def idle_until_waited_for(trainer, servers):
    """The second window is written while the learner waits: both sample from torch's one generator."""
    waits, wait_for_next = threading.Event(), trainer.overlap.wait_for_next
    first = {trainer.train_dataset[index].sample_id for index in trainer.plan.at(0).sample_indices}

    def wait(server, ids):
        assert first.issuperset(ids) or waits.wait(PATIENCE_S)

    def said():
        if trainer.state.global_step:
            waits.set()
        wait_for_next()

    servers.before_call, trainer.overlap.wait_for_next = wait, said


@pytest.mark.scenario(
    "prefetch/an-evaluation-inside-a-window", clauses=["prefetch/an-evaluation-leaves-alone-what-is-on-its-way#1"]
)
def test_an_evaluation_inside_a_window_changes_nothing_of_what_is_learnt(tmp_path):
    cut = {"max_staleness": 4, "lead": 1, "pieces": 3, "callers": 1} | SHALLOW
    alone = (*WINDOW, "training.max_steps=6", "training.eval_steps=0")
    plain = ran(tmp_path / "plain", "ahead", *alone, prepare=idle_until_waited_for, **cut)
    looked_at = (*WINDOW, "training.max_steps=6", "training.eval_steps=1")
    trainer = ran(tmp_path / "looked_at", "ahead", *looked_at, prepare=busy_until_an_evaluation, **cut)
    assert [event["step"] for event in events(trainer, "synced")] == [*range(7)]
    versions = [segment.policy_version for _, segments in trainer.learnt for segment in segments]
    assert versions == [1] * 18, "the second window was asked for when the first one was"
    assert ids_learnt(trainer) == ids_learnt(plain)
    assert not events(trainer, "asked_again")
    assert not step_between(weights_of(plain.model), weights_of(trainer.model)).any()
