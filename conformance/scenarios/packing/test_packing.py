"""Capability ``packing``, scenario by scenario."""

from dataclasses import replace

import pytest
import torch

from conformance.doubles.configs import refusal_of
from conformance.doubles.models import make_packed_model, packed_logits
from conformance.doubles.segments import ids_of, make_packer, make_row, make_segment


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
