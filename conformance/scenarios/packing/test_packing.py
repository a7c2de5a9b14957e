"""Capability ``packing``, scenario by scenario."""

from dataclasses import replace

import pytest
import torch

from conformance.doubles.configs import refusal_of
from conformance.doubles.digits import load_digits
from conformance.doubles.models import make_packed_model, packed_logits
from conformance.doubles.refusals import refused
from conformance.doubles.segments import ids_of, make_packer, make_row, make_segment
from rollmatch.run.prompts import check_packing


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
    packer = make_packer(2, 2, 2)
    assert ids_of(packer.pop_row(rows_to_follow=1).segments) == [0, 1]
    assert [ids_of(packer.pop_row().segments) for _ in range(packer.buffered)] == [[2]]


@pytest.mark.scenario("packing/a-buffer-that-must-overflow", clauses=["packing/the-waiting-list-is-bounded#7"])
def test_a_buffer_that_must_overflow():
    rollout, training = "custom.extra.rollout_matching", "training.per_device_train_batch_size=4"
    narrow = ("global_max_length=10", f"{rollout}.max_new_tokens=1", f"{rollout}.vllm.max_model_len=null", training)
    narrow = (*narrow, "training.gradient_accumulation_steps=1", "training.packing=true", "training.packing_buffer=8")

    def start(steps, lengths):
        check_packing(load_digits(*narrow, f"training.max_steps={steps}"), lengths, learner_world_size=1)

    with refused("packing-buffer-full", "training.packing_buffer"):
        start(3, [5, 5])
    start(2, [5, 5])
    start(1000, [1, 2])


@pytest.mark.scenario(
    "packing/a-change-in-one-segment-leaves-the-other-alone",
    clauses=["packing/segments-of-a-row-do-not-see-each-other#1"],
)
def test_a_change_in_one_segment_leaves_the_other_alone():
    (first, images), (second, others) = make_segment(0), make_segment(1)
    head, other, *tail = first.token_ids
    packed_model, changed = make_packed_model(), replace(first, token_ids=(head, (other + 1) % 256, *tail))
    with torch.no_grad():
        before, after = (packed_logits(packed_model, make_row(s, second), [images, others]) for s in (first, changed))
    cut = first.encoded_len
    assert not torch.equal(before[:cut], after[:cut])
    assert torch.equal(before[cut:], after[cut:])
