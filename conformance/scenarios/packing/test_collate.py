"""Collation: restarting positions, images beside their segments, the padded form, the order of segments."""

from dataclasses import replace

import pytest
import torch

from conformance.doubles.loss_cases import MASK, RULES, row_of
from conformance.doubles.models import TOLERANCE
from conformance.doubles.refusals import refused
from conformance.doubles.segments import features_of, make_row, make_segment, plain_segments
from conformance.doubles.tiny_qwen3_vl import IMAGE_ID, PAD_ID, VIDEO_ID
from rollmatch.learn.batch import Batcher, make_model_inputs, make_padded_inputs
from rollmatch.learn.pack import Packer
from rollmatch.model.images import NO_IMAGES
from rollmatch.objectives.rollout_matching.objective import RolloutMatchingObjective


def collate(pairs, model):
    row, images = row_of(pairs)
    return make_model_inputs(row, images=images, model=model)


def test_a_row_of_text_alone_carries_no_pixels_and_a_text_model_takes_flat_positions(model, text_model):
    pairs = [make_segment(0), make_segment(2, num_slots=6)]
    inputs = collate(pairs, model)
    assert not {"pixel_values", "image_grid_thw"} & inputs.keys()
    assert not inputs["mm_token_type_ids"].any()
    inputs = collate(pairs, text_model)
    assert inputs["position_ids"].tolist() == [[i for segment, _ in pairs for i in range(segment.encoded_len)]]
    assert "mm_token_type_ids" not in inputs
    segments = [segment for segment, _ in pairs]
    inputs = make_padded_inputs(segments, images=[NO_IMAGES] * 2, model=text_model, pad_id=PAD_ID)
    assert inputs["position_ids"].shape == inputs["input_ids"].shape
    with torch.no_grad():
        padded = text_model(**inputs).logits
        alone = text_model(input_ids=torch.tensor([segments[0].token_ids])).logits[0]
    torch.testing.assert_close(padded[0, : len(alone)], alone, rtol=0, atol=TOLERANCE)


def drop_last_image(images):
    grid = images.tensors["image_grid_thw"][:-1]
    return features_of(images.tensors["pixel_values"][: int(grid.prod(-1).sum())], grid)


def swap_images(images):
    return features_of(images.tensors["pixel_values"], images.tensors["image_grid_thw"].flip(0))


@pytest.mark.parametrize("damage", [drop_last_image, swap_images, lambda images: NO_IMAGES])
def test_images_that_are_not_those_of_the_placeholders_are_refused(damage, model):
    segment, images = make_segment(1, num_images=2)
    with refused("image-tokens-mismatch", "train.jsonl:2"):
        collate([(segment, damage(images))], model)
    collate([(segment, images)], model)


def test_images_come_one_entry_per_segment_and_to_a_model_that_takes_them(batch, model, text_model):
    row, images = batch
    with refused("images-not-aligned", "images"):
        make_model_inputs(row, images=images[:3], model=model)
    make_model_inputs(row, images=images, model=model)
    segment, images = make_segment(1, num_images=1)
    with refused("image-tokens-mismatch", "train.jsonl:2"):
        collate([(segment, images)], text_model)
    collate([(segment, NO_IMAGES)], text_model)


@pytest.mark.parametrize(("token_id", "code"), [(IMAGE_ID, "image-tokens-mismatch"), (VIDEO_ID, "video-tokens")])
def test_a_placeholder_sampled_in_a_rollout_is_refused(token_id, code, model):
    segment, images = make_segment(1, num_images=1)
    sampled = replace(segment, token_ids=(*segment.token_ids[:-2], token_id, segment.token_ids[-1]))
    with refused(code, "train.jsonl:2"):
        collate([(sampled, images)], model)
    collate([(segment, images)], model)


@pytest.mark.scenario(
    "packing/offsets-of-three-segments", clauses=["packing/each-segment-of-a-row-keeps-its-description#1,2,3"]
)
def test_a_micro_batch_keeps_its_segments_in_the_order_of_its_row(pairs, model):
    images = {segment.sample.sample_id: features for segment, features in pairs}
    objective = RolloutMatchingObjective(
        target=None, eval_target=None, mask_rules=MASK["rules"], loss_rules=RULES, bin_of=MASK["bin_of"]
    )
    batcher = Batcher(model, objective, packer=Packer(4096, max_buffered=8), pad_id=PAD_ID)
    (batch,) = batcher.make([segment for segment, _ in pairs], lambda sample: images[sample.sample_id], num_batches=1)
    assert sorted(batch.segments, key=lambda one: one.sample.sample_id) == [segment for segment, _ in pairs]
    ids, offset, slots = batch.inputs["input_ids"][0].tolist(), 0, []
    for segment in batch.segments:
        assert segment.encoded_len == segment.prompt_len + segment.train_len
        assert tuple(ids[offset : offset + segment.encoded_len]) == segment.token_ids
        slots += [offset + position for position in segment.coord_positions]
        offset += segment.encoded_len
    assert offset == len(ids) == batch.num_tokens
    supervision = batch.supervision
    assert set(slots) <= set(supervision.coord_positions)
    assert make_row(*plain_segments(3, 2, 4)).offsets == (0, 3, 5)
