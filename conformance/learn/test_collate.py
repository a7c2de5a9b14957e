"""Collation: restarting positions, images beside their segments, the padded form, the metadata."""

from dataclasses import replace

import pytest
import torch

from conformance.doubles.tiny_qwen3_vl import IMAGE_ID, PAD_ID, VIDEO_ID, make_tiny_qwen3
from conformance.learn.models import TOLERANCE, make_packed_model, padded_logits, single_logits
from conformance.learn.segments import features_of, make_row, make_segment
from rollmatch.learn.batch import (
    ImagesNotAligned,
    ImageTokensMismatch,
    VideoTokens,
    make_model_inputs,
    make_padded_inputs,
    row_metadata,
)
from rollmatch.model.images import NO_IMAGES


@pytest.fixture(scope="module")
def model():
    return make_packed_model()


@pytest.fixture(scope="module")
def text_model():
    return make_tiny_qwen3()


@pytest.fixture(scope="module")
def pairs():
    return [make_segment(seed, num_images=count) for seed, count in enumerate((1, 2, 0, 3))]


def collate(pairs, model):
    return make_model_inputs(make_row(*(s for s, _ in pairs)), images=[i for _, i in pairs], model=model)


def test_a_row_concatenates_ids_and_restarts_positions(pairs, model):
    inputs = collate(pairs, model)
    lengths = [segment.encoded_len for segment, _ in pairs]
    assert inputs["input_ids"].tolist() == [[token for segment, _ in pairs for token in segment.token_ids]]
    assert inputs["position_ids"].shape == (4, 1, sum(lengths))
    assert inputs["position_ids"][0, 0].tolist() == [index for length in lengths for index in range(length)]
    assert inputs["cu_seq_lens_q"].tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert torch.equal(inputs["cu_seq_lens_q"], inputs["cu_seq_lens_k"])
    assert inputs["max_length_q"] == inputs["max_length_k"] == max(lengths)
    assert inputs["use_cache"] is False
    assert "attention_mask" not in inputs


def test_mrope_positions_are_those_of_each_segment_alone(pairs, model):
    rows = collate(pairs, model)["position_ids"].split([segment.encoded_len for segment, _ in pairs], dim=2)
    for (segment, images), ours in zip(pairs, rows, strict=True):
        ids = torch.tensor([segment.token_ids])
        grid = images.tensors.get("image_grid_thw")
        types = (ids == IMAGE_ID).int()
        theirs, _ = model.model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grid)
        assert torch.equal(ours[1:], theirs)


def test_images_follow_their_segments(pairs, model):
    inputs = collate(pairs, model)
    assert torch.equal(inputs["mm_token_type_ids"], (inputs["input_ids"] == IMAGE_ID).int())
    for name in ("image_grid_thw", "pixel_values"):
        assert torch.equal(inputs[name], torch.cat([i.tensors[name] for _, i in pairs if i is not NO_IMAGES]))
    assert len(inputs["pixel_values"]) == inputs["image_grid_thw"].prod(-1).sum()


def test_a_row_of_text_alone_carries_no_pixels(model):
    inputs = collate([make_segment(0), make_segment(1)], model)
    assert "pixel_values" not in inputs
    assert "image_grid_thw" not in inputs
    assert not inputs["mm_token_type_ids"].any()


def test_a_text_model_takes_one_row_of_positions(text_model):
    pairs = [make_segment(0), make_segment(1)]
    inputs = collate(pairs, text_model)
    assert inputs["position_ids"].tolist() == [[i for segment, _ in pairs for i in range(segment.encoded_len)]]
    assert "mm_token_type_ids" not in inputs


def test_padded_inputs_pad_on_the_right_and_mask_it(pairs, model):
    segments = [segment for segment, _ in pairs]
    inputs = make_padded_inputs(segments, images=[i for _, i in pairs], model=model, pad_id=PAD_ID)
    longest = max(segment.encoded_len for segment in segments)
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (4, longest)
    assert inputs["position_ids"].shape == (4, 4, longest)
    for place, segment in enumerate(segments):
        real = segment.encoded_len
        assert inputs["input_ids"][place, :real].tolist() == list(segment.token_ids)
        assert set(inputs["input_ids"][place, real:].tolist()) <= {PAD_ID}
        assert inputs["attention_mask"][place].tolist() == [1] * real + [0] * (longest - real)


def test_padded_logits_are_the_unpadded_ones(pairs, model):
    with torch.no_grad():
        padded = padded_logits(model, [s for s, _ in pairs], [i for _, i in pairs])
        for place, (segment, images) in enumerate(pairs):
            alone = single_logits(model, segment, images)
            torch.testing.assert_close(padded[place, : segment.encoded_len], alone, rtol=0, atol=TOLERANCE)


def test_padded_inputs_of_a_text_model_have_flat_positions(text_model):
    segments = [make_segment(0)[0], make_segment(2, num_slots=6)[0]]
    inputs = make_padded_inputs(segments, images=[NO_IMAGES] * 2, model=text_model, pad_id=PAD_ID)
    assert inputs["position_ids"].shape == inputs["input_ids"].shape
    with torch.no_grad():
        padded = text_model(**inputs).logits
        alone = text_model(input_ids=torch.tensor([segments[0].token_ids])).logits[0]
    torch.testing.assert_close(padded[0, : len(alone)], alone, rtol=0, atol=TOLERANCE)


def test_images_come_one_entry_per_segment(pairs, model):
    row = make_row(*(segment for segment, _ in pairs))
    with pytest.raises(ImagesNotAligned) as caught:
        make_model_inputs(row, images=[i for _, i in pairs][:3], model=model)
    assert (caught.value.code, caught.value.key) == ("images-not-aligned", "images")
    make_model_inputs(row, images=[i for _, i in pairs], model=model)


def drop_last_image(images):
    grid = images.tensors["image_grid_thw"][:-1]
    return features_of(images.tensors["pixel_values"][: int(grid.prod(-1).sum())], grid)


def swap_images(images):
    return features_of(images.tensors["pixel_values"], images.tensors["image_grid_thw"].flip(0))


@pytest.mark.parametrize("damage", [drop_last_image, swap_images, lambda images: NO_IMAGES])
def test_images_that_are_not_those_of_the_placeholders_are_refused(damage, model):
    segment, images = make_segment(1, num_images=2)
    with pytest.raises(ImageTokensMismatch) as caught:
        collate([(segment, damage(images))], model)
    assert (caught.value.code, caught.value.key) == ("image-tokens-mismatch", "train.jsonl:2")
    collate([(segment, images)], model)


@pytest.mark.parametrize(
    ("token_id", "error", "code"),
    [(IMAGE_ID, ImageTokensMismatch, "image-tokens-mismatch"), (VIDEO_ID, VideoTokens, "video-tokens")],
)
def test_a_placeholder_sampled_in_a_rollout_is_refused(token_id, error, code, model):
    segment, images = make_segment(1, num_images=1)
    sampled = replace(segment, token_ids=(*segment.token_ids[:-2], token_id, segment.token_ids[-1]))
    with pytest.raises(error) as caught:
        collate([(sampled, images)], model)
    assert (caught.value.code, caught.value.key) == (code, "train.jsonl:2")
    collate([(segment, images)], model)


def test_a_text_model_takes_no_images(text_model):
    segment, images = make_segment(1, num_images=1)
    with pytest.raises(ImageTokensMismatch) as caught:
        collate([(segment, images)], text_model)
    assert caught.value.key == "train.jsonl:2"
    collate([(segment, NO_IMAGES)], text_model)


@pytest.mark.scenario(
    "packing/offsets-of-three-segments", clauses=["packing/each-segment-of-a-row-keeps-its-description#1,2,3"]
)
def test_metadata_describes_each_segment_in_order(pairs):
    row = make_row(*(segment for segment, _ in pairs))
    metadata = row_metadata(row)
    ids = [token for segment in row.segments for token in segment.token_ids]
    offset = 0
    for meta, segment in zip(metadata, row.segments, strict=True):
        assert meta["encoded_len"] == meta["prompt_len"] + meta["train_len"] == segment.encoded_len
        assert ids[offset : offset + meta["prompt_len"]] == meta["prompt_ids"]
        assert meta["prefix_len"] == segment.prefix_len
        assert (meta["coord_positions"], meta["coord_bins"]) == (
            list(segment.coord_positions),
            list(segment.coord_bins),
        )
        assert meta["desc_positions"] == list(segment.desc_positions)
        offset += meta["encoded_len"]
    assert offset == row.num_tokens
