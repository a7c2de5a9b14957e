"""Capability ``packing``, scenario by scenario."""

import pytest
import torch

from conformance.doubles.tiny_qwen3_vl import bin_of, make_tiny_qwen3_vl
from conformance.learn.models import make_packed_model, packed_logits, single_logits
from conformance.learn.segments import make_row, make_segment, plain_segment, plain_segments
from conformance.scenarios.configs import config_with, not_refused, problem_of, refusal_of
from conformance.trainer.small_run import make_trainer
from rollmatch.learn.batch import row_metadata
from rollmatch.learn.pack import NothingToPack, Packer, PackingBufferFull, SegmentTooLong
from rollmatch.objectives.rollout_matching.supervision import IGNORED, MaskRules, mask_row, mask_segment
from rollmatch.records import Sample, Segment

MASK = {"rules": MaskRules(), "bin_of": bin_of}


def packer_with(*lengths, capacity=10, max_buffered=512):
    packer = Packer(capacity, max_buffered=max_buffered, min_fill_ratio=0.65)
    packer.add(plain_segments(*lengths))
    return packer


def ids_of(segments):
    return [segment.sample.sample_id for segment in segments]


@pytest.mark.scenario(
    "packing/a-key-for-another-row-length-is-refused", clauses=["packing/packing-happens-after-the-rollouts#2,3"]
)
def test_a_key_for_another_row_length_is_refused():
    problem = problem_of("training.packing_length=4096")
    assert (problem.code, problem.key) == ("removed-key", "training.packing_length")
    assert "global_max_length" in problem.remedy


@pytest.mark.scenario(
    "packing/a-key-for-another-scope-is-refused", clauses=["packing/packing-happens-after-the-rollouts#4"]
)
def test_a_key_for_another_scope_is_refused():
    key = "custom.extra.rollout_matching.post_rollout_pack_scope"
    assert refusal_of("~.post_rollout_pack_scope=window") == ("removed-key", key)


@pytest.mark.scenario("packing/a-packing-config-without-these-keys-is-accepted")
def test_a_packing_config_without_these_keys_is_accepted():
    with not_refused():
        config = config_with("training.packing=true", "global_max_length=4096")
    assert (config.training.packing, config.global_max_length) == (True, 4096)


@pytest.mark.scenario(
    "packing/a-segment-that-is-too-long",
    clauses=["packing/packing-happens-after-the-rollouts#5", "packing/a-segment-is-never-split#2,3,4"],
)
def test_a_segment_that_is_too_long():
    packer = packer_with(6, 3)
    long = plain_segment(11, sample_id=3)
    with pytest.raises(SegmentTooLong) as caught:
        packer.add([plain_segment(2, sample_id=2), long])
    assert (caught.value.code, caught.value.key) == ("segment-too-long", long.sample.origin)
    for name in ("global_max_length", "max_new_tokens", "training.packing"):
        assert name in caught.value.remedy
    assert [segment.encoded_len for segment in packer.state()] == [6, 3]


@pytest.mark.scenario("packing/a-segment-of-exactly-one-row", clauses=["packing/a-segment-is-never-split#1"])
def test_a_segment_of_exactly_one_row():
    with not_refused():
        row = packer_with(10).pop_row()
    assert row.lengths == (10,)
    assert row.fill == 1.0


@pytest.mark.scenario(
    "packing/a-gap-is-filled-exactly", clauses=["packing/a-row-is-filled-as-well-as-can-be-oldest-first#1,2,4,5"]
)
def test_a_gap_is_filled_exactly():
    packer = packer_with(6, 3, 2, 2)
    assert ids_of(packer.pop_row().segments) == [0, 2, 3]
    assert [segment.encoded_len for segment in packer.state()] == [3]


@pytest.mark.scenario(
    "packing/the-older-of-two-equal-choices", clauses=["packing/a-row-is-filled-as-well-as-can-be-oldest-first#1,3,4,5"]
)
def test_the_older_of_two_equal_choices():
    packer = packer_with(6, 3, 2, 2, 2)
    assert ids_of(packer.pop_row().segments) == [0, 2, 3]
    assert [(segment.sample.sample_id, segment.encoded_len) for segment in packer.state()] == [(1, 3), (4, 2)]


@pytest.mark.scenario("packing/one-segment-too-many", clauses=["packing/the-waiting-list-is-bounded#1,2"])
def test_one_segment_too_many():
    packer = packer_with(4, 4, max_buffered=3)
    with pytest.raises(PackingBufferFull) as caught:
        packer.add(plain_segments(4, 4))
    assert (caught.value.code, caught.value.key) == ("packing-buffer-full", "training.packing_buffer")
    assert packer.buffered == 2
    assert config_with().training.packing_buffer == 512


@pytest.mark.scenario("packing/as-many-segments-as-allowed", clauses=["packing/the-waiting-list-is-bounded#2"])
def test_as_many_segments_as_allowed():
    packer = packer_with(4, 4, max_buffered=3)
    with not_refused():
        packer.add(plain_segments(4))
    assert packer.buffered == 3


@pytest.mark.scenario("packing/a-last-short-row-is-not-promised", clauses=["packing/the-waiting-list-is-bounded#4"])
def test_a_last_short_row_is_not_promised():
    refused = refusal_of("training.packing=true", "training.packing_drop_last=false")
    assert refused == ("packing-never-flushes", "training.packing_drop_last")


@pytest.mark.scenario(
    "packing/no-row-of-a-step-stays-empty", clauses=["packing/a-row-is-filled-as-well-as-can-be-oldest-first#6"]
)
def test_no_row_of_a_step_stays_empty():
    packer = packer_with(2, 2, 2)
    assert ids_of(packer.pop_row(rows_to_follow=1).segments) == [0, 1]
    assert [ids_of(packer.pop_row().segments) for _ in range(packer.buffered)] == [[2]]


@pytest.mark.scenario("packing/a-row-without-segments-is-refused", clauses=["packing/the-waiting-list-is-bounded#5"])
def test_a_row_without_segments_is_refused():
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - another error is to fail an assertion, not the test
        packer_with().pop_row()
    assert isinstance(caught.value, NothingToPack)
    assert caught.value.code == "nothing-to-pack"
    assert packer_with(3).pop_row().lengths == (3,)


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


@pytest.mark.scenario(
    "packing/offsets-of-three-segments", clauses=["packing/each-segment-of-a-row-keeps-its-description#1,2,3"]
)
def test_offsets_of_three_segments():
    row = make_row(*plain_segments(3, 2, 4))
    assert row.offsets == (0, 3, 5)
    entries = row_metadata(row)
    assert [entry["encoded_len"] for entry in entries] == [3, 2, 4]
    assert [(entry["prompt_len"], entry["prefix_len"], entry["train_len"]) for entry in entries] == [
        *((1, 0, 2), (1, 0, 1), (1, 0, 3))
    ]
    assert all(entry["prompt_ids"] == [7] and entry["coord_positions"] == [] for entry in entries)


def segment_of(sample_id, length, *, slot, coord_bin):
    """A prompt of two tokens, a prefix that ends with a slot, a tail of text."""
    ids = [1] * length
    ids[slot] = 264 + 9
    origin = Sample(sample_id=sample_id, origin=f"x:{sample_id}", images=(), objects=(), width=8, height=8)
    return Segment(
        sample=origin,
        policy_version=1,
        token_ids=tuple(ids),
        prompt_len=2,
        prefix_len=slot - 1,
        coord_positions=(slot,),
        coord_bins=(coord_bin,),
    )


@pytest.mark.scenario(
    "packing/packed-labels-equal-unpacked-labels", clauses=["packing/each-segment-of-a-row-keeps-its-description#4"]
)
def test_packed_labels_equal_unpacked_labels():
    first, second = segment_of(0, 8, slot=4, coord_bin=3), segment_of(1, 5, slot=3, coord_bin=5)
    alone = [mask_segment(segment, **MASK) for segment in (first, second)]
    packed = mask_row(make_row(first, second), **MASK)
    assert packed.labels[:8] == alone[0].labels == (IGNORED,) * 5 + (1,) * 3
    assert packed.labels[8:] == alone[1].labels == (IGNORED,) * 4 + (1,)
    assert packed.coord_positions == (4, 8 + 3)
    assert packed.coord_bins == (3, 5)
    assert packed.labels[8] == IGNORED


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


@pytest.mark.scenario(
    "packing/images-in-every-segment", clauses=["packing/segments-of-a-row-do-not-see-each-other#2,3"]
)
def test_images_in_every_segment(packed_model):
    pairs = [make_segment(seed, num_images=count) for seed, count in enumerate((0, 1, 2, 3))]
    row, images = make_row(*(segment for segment, _ in pairs)), [some for _, some in pairs]
    plain = make_tiny_qwen3_vl()
    with torch.no_grad():
        packed = packed_logits(packed_model, row, images).split(list(row.lengths))
        alone = [single_logits(plain, *pair) for pair in pairs]
    assert max(float((one - other).abs().max()) for one, other in zip(packed, alone, strict=True)) < 1e-5
