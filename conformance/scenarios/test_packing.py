"""Capability ``packing``, scenario by scenario."""

import pytest
import torch

from conformance.learn.models import make_packed_model, packed_logits
from conformance.learn.segments import make_row, make_segment, plain_segments
from conformance.scenarios.configs import refusal_of
from conformance.trainer.small_run import make_trainer
from rollmatch.learn.pack import Packer
from rollmatch.records import Segment


def packer_with(*lengths, capacity=10, max_buffered=512):
    packer = Packer(capacity, max_buffered=max_buffered, min_fill_ratio=0.65)
    packer.add(plain_segments(*lengths))
    return packer


def ids_of(segments):
    return [segment.sample.sample_id for segment in segments]


@pytest.mark.scenario(
    "packing/a-key-for-another-scope-is-refused", clauses=["packing/packing-happens-after-the-rollouts#4"]
)
def test_a_key_for_another_scope_is_refused():
    key = "custom.extra.rollout_matching.post_rollout_pack_scope"
    assert refusal_of("~.post_rollout_pack_scope=window") == ("removed-key", key)


@pytest.mark.scenario(
    "packing/no-row-of-a-step-stays-empty", clauses=["packing/a-row-is-filled-as-well-as-can-be-oldest-first#6"]
)
def test_no_row_of_a_step_stays_empty():
    packer = packer_with(2, 2, 2)
    assert ids_of(packer.pop_row(rows_to_follow=1).segments) == [0, 1]
    assert [ids_of(packer.pop_row().segments) for _ in range(packer.buffered)] == [[2]]


@pytest.mark.scenario("packing/a-resumed-run-packs-on", clauses=["packing/the-waiting-list-is-bounded#6"])
def test_a_resumed_run_packs_on(tmp_path):
    overrides = ("training.packing=true", "training.max_steps=1", "training.save_steps=1")
    trainer = make_trainer(tmp_path / "one", *overrides)
    sample_ids = [5, 2, 7]
    samples = {sample.sample_id: sample for sample in trainer.train_dataset}
    waiting = [
        Segment(sample=samples[i], policy_version=1, token_ids=(7, 8, 9 + i), prompt_len=1, prefix_len=0)
        for i in sample_ids
    ]
    trainer.learner.batcher.packer.restore(waiting)
    trainer.create_optimizer_and_scheduler(num_training_steps=1)
    trainer._save_checkpoint(trainer.model, None)
    resumed = make_trainer(tmp_path / "two", *overrides)
    resumed.restore_packer_state(tmp_path / "one" / "checkpoint-0")
    assert resumed.learner.batcher.packer.state() == waiting
    assert resumed.learner.batcher.packer.pop_row().segments[0] == waiting[0]


@pytest.fixture(scope="module")
def packed_model():
    return make_packed_model()


@pytest.mark.scenario(
    "packing/a-change-in-one-segment-leaves-the-other-alone",
    clauses=["packing/segments-of-a-row-do-not-see-each-other#1"],
)
def test_a_change_in_one_segment_leaves_the_other_alone(packed_model):
    (first, images), (second, others) = make_segment(0), make_segment(1)
    ids = list(first.token_ids)
    ids[1] = (ids[1] + 1) % 256
    changed = Segment(
        sample=first.sample,
        policy_version=1,
        token_ids=tuple(ids),
        prompt_len=first.prompt_len,
        prefix_len=first.prefix_len,
    )
    with torch.no_grad():
        before, after = (packed_logits(packed_model, make_row(s, second), [images, others]) for s in (first, changed))
    cut = first.encoded_len
    assert not torch.equal(before[:cut], after[:cut])
    assert torch.equal(before[cut:], after[cut:])
