"""Cutting at the left moves indices, and nothing else."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.records import segment_with
from conformance.doubles.refusals import refused
from conformance.doubles.segments import sample_of
from rollmatch.model.overlong import LengthRules, cut_left
from rollmatch.records import PolicyTarget

IMAGE, FRAME = 99, 90


def is_kept(token_id):
    return token_id >= FRAME


def rules(overlong, max_len=10):
    return LengthRules(max_len=max_len, overlong=overlong, is_kept=is_kept, image_id=IMAGE)


def segment(prompt, target, **more):
    ids = (*prompt, *target)
    return segment_with(ids, sample=sample_of(2), prompt_len=len(prompt), prefix_len=3, **more)


LONG = segment((1, 2, FRAME, 4), (20, 21, 22, 23, 24, 25, 26), coord_positions=(5, 6), coord_bins=(1, 2))


@given(st.lists(st.sampled_from([1, 2, 3, FRAME, IMAGE]), min_size=1, max_size=12), st.integers(1, 12))
@pytest.mark.scenario(
    "packing/a-prompt-is-cut-at-the-left", clauses=["packing/one-key-decides-about-what-is-too-long#6"]
)
def test_a_cut_takes_the_first_words_and_neither_framing_nor_what_is_between_images(ids, num_excess):
    cut = cut_left(ids, num_excess, is_kept=is_kept, image_id=IMAGE)
    images = [place for place, token_id in enumerate(ids) if token_id == IMAGE]
    inside = range(images[0], images[-1]) if images else ()
    words = [place for place, i in enumerate(ids[:-1]) if i < FRAME and place not in inside]
    if num_excess > len(words):
        assert cut is None
    else:
        assert cut == tuple(i for place, i in enumerate(ids) if place not in words[:num_excess])
    assert cut_left((90, 1, 2, 91, 3, 4), 3, is_kept=is_kept, image_id=IMAGE) == (90, 91, 4)


@pytest.mark.scenario("packing/a-segment-is-cut-in-its-prompt")
def test_a_cut_segment_keeps_its_target_and_its_slots_move_along():
    cut = rules("truncate_left").fit(LONG)
    assert cut == replace(LONG, token_ids=LONG.token_ids[1:], prompt_len=3, coord_positions=(4, 5))
    assert rules("truncate_left", max_len=11).fit(LONG) is LONG
    described = segment(
        (1, 2, 3, 4),
        (20, 21, 22, 23, 24, 25, 26),
        desc_positions=(8,),
        corrected_positions=(5, 6),
        corrected_labels=(7, 8),
    )
    cut = rules("truncate_left").fit(described)
    assert (cut.desc_positions, cut.corrected_positions, cut.corrected_labels) == ((7,), (4, 5), (7, 8))


@pytest.mark.parametrize(
    ("overlong", "long"),
    [
        ("skip", replace(LONG, corrected_positions=(4,), corrected_labels=(7,))),
        ("truncate_left", segment((FRAME, IMAGE, 1, IMAGE), (20, 21, 22, 23, 24, 25, 26))),
        ("truncate_left", replace(LONG, policy=PolicyTarget(advantages=(1.0,) * 7, old_logprobs=(-1.0,) * 7))),
    ],
)
@pytest.mark.scenario(
    "packing/a-segment-that-is-too-long-is-skipped", clauses=["packing/one-key-decides-about-what-is-too-long#5"]
)
def test_what_cannot_be_cut_becomes_a_stub_without_supervision(overlong, long):
    stub = rules(overlong).fit(long)
    assert (stub.token_ids, stub.prompt_len, stub.prefix_len) == (long.token_ids[:5], 4, 1)
    assert stub.coord_positions == stub.coord_bins == stub.desc_positions == ()
    assert stub.corrected_positions == stub.corrected_labels == ()
    if long.policy is not None:
        assert stub.policy == PolicyTarget(advantages=(0.0,), old_logprobs=(-1.0,), is_masked=True)


@pytest.mark.parametrize(("overlong", "max_len"), [("error", 10), ("skip", 4), ("truncate_left", 4)])
@pytest.mark.scenario(clauses=["packing/one-key-decides-about-what-is-too-long#4"])
def test_a_segment_that_must_not_or_cannot_be_shorter_is_refused(overlong, max_len):
    with refused("segment-too-long", "train.jsonl:3"):
        rules(overlong, max_len).fit(LONG)
