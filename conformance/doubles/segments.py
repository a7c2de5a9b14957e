"""Segments for tests: short, random, whole (prompt, prefix, tail, EOS), with real images."""

import random
from dataclasses import replace

import torch

from conformance.doubles.records import make_sample, segment_with
from conformance.doubles.tiny_qwen3_vl import (
    COORD_IDS,
    EOS_ID,
    IMAGE_ID,
    MERGE_SIZE,
    NUM_TEXT_IDS,
    VALUES_PER_PATCH,
    VISION_END_ID,
    VISION_START_ID,
)
from rollmatch.learn.pack import Packer
from rollmatch.model.images import NO_IMAGES, ImageFeatures
from rollmatch.records import Row, Sample, Segment

GRIDS = ((1, 4, 4), (1, 4, 6), (1, 2, 8))
"""Patches (time, height, width) of the images that segments get, in turn."""


def sample_of(sample_id: int = 0) -> Sample:
    return make_sample(sample_id=sample_id, origin=f"train.jsonl:{sample_id + 1}")


def plain_segment(length: int, sample_id: int = 0) -> Segment:
    """A segment of which only the length matters."""
    return segment_with((7,) * length, sample=sample_of(sample_id))


def plain_segments(*lengths: int) -> list[Segment]:
    return [plain_segment(length, sample_id) for sample_id, length in enumerate(lengths)]


def make_row(*segments: Segment) -> Row:
    return Row(segments=segments, capacity=4096)


def make_segment(seed: int, *, num_images: int = 0, num_slots: int = 4) -> tuple[Segment, ImageFeatures]:
    """``write_segment``'s, and its images."""
    segment = write_segment(seed, num_images=num_images, num_slots=num_slots)
    return segment, _make_images(seed, _grids_of(seed, num_images))


POSITIONS = ("coord_positions", "desc_positions", "corrected_positions")


def make_group(seed: int, size: int, *, num_images: int) -> list[tuple[Segment, ImageFeatures]]:
    """So many segments with the prompt and the images of the first, each with a target of its own."""
    first, images = make_segment(seed, num_images=num_images)
    made = [first]
    for index in range(1, size):
        other = write_segment(seed + 100 * index, num_slots=2 * (index % 4))
        moved = first.prompt_len - other.prompt_len
        made.append(
            replace(
                other,
                sample=first.sample,
                token_ids=first.token_ids[: first.prompt_len] + other.token_ids[other.prompt_len :],
                prompt_len=first.prompt_len,
                **{name: tuple(place + moved for place in getattr(other, name)) for name in POSITIONS},
            )
        )
    return [(segment, images) for segment in made]


def write_segment(seed: int, *, num_images: int = 0, num_slots: int = 4) -> Segment:
    """Prompt (images, words), prefix with one matched and one unmatched object, tail with one object and EOS.

    ``num_slots`` is 4 for a box, 2n for a polygon, 0 for no object at all.
    """
    dice = random.Random(seed)

    def words(count: int) -> list[int]:
        return [dice.randrange(NUM_TEXT_IDS) for _ in range(count)]

    def coords() -> list[int]:
        return [dice.choice(COORD_IDS) for _ in range(num_slots)]

    prompt = words(3)
    for time, height, width in _grids_of(seed, num_images):
        prompt += [VISION_START_ID, *[IMAGE_ID] * (time * height * width // MERGE_SIZE**2), VISION_END_ID, *words(1)]
    prompt += words(2 + seed % 3)
    prefix = [*words(2), *coords(), *words(2), *coords(), *words(1)]
    first_slot = len(prompt) + 2
    head, desc = words(2), words(3)
    tail = [*head, *desc, *words(1), *coords(), *words(2), EOS_ID]
    desc_start = len(prompt) + len(prefix) + len(head)
    return segment_with(
        (*prompt, *prefix, *tail),
        sample=sample_of(seed),
        prompt_len=len(prompt),
        prefix_len=len(prefix),
        coord_positions=tuple(range(first_slot, first_slot + num_slots)),
        coord_bins=tuple(dice.randrange(1000) for _ in range(num_slots)),
        desc_positions=tuple(range(desc_start, desc_start + len(desc))),
    )


def _grids_of(seed: int, num_images: int) -> list[tuple[int, int, int]]:
    return [GRIDS[(seed + index) % len(GRIDS)] for index in range(num_images)]


def _make_images(seed: int, grids: list[tuple[int, int, int]]) -> ImageFeatures:
    if not grids:
        return NO_IMAGES
    grid = torch.tensor(grids)
    pixels = torch.randn(int(grid.prod(-1).sum()), VALUES_PER_PATCH, generator=torch.Generator().manual_seed(seed))
    return features_of(pixels, grid)


def features_of(pixels: torch.Tensor, grid: torch.Tensor) -> ImageFeatures:
    """Patches [n, values] of images of so many patches [images, 3], as a processor of Qwen3-VL gives them."""
    counts = tuple(patches // MERGE_SIZE**2 for patches in grid.prod(-1).tolist())
    return ImageFeatures(
        tensors={"pixel_values": pixels, "image_grid_thw": grid},
        expansions=tuple((IMAGE_ID,) * count for count in counts),
        num_placeholders=counts,
    )


def make_packer(*lengths, capacity=10, max_buffered=512):
    packer = Packer(capacity, max_buffered=max_buffered)
    packer.add(plain_segments(*lengths))
    return packer


def ids_of(segments):
    return [segment.sample.sample_id for segment in segments]
