"""Masks: what each position teaches, and that packing moves masks without changing them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.loss_cases import mask_row
from conformance.doubles.records import segment_with
from conformance.doubles.refusals import refused
from conformance.doubles.segments import make_row, sample_of, write_segment
from conformance.doubles.tiny_qwen3_vl import COORD_IDS, EOS_ID, bin_of
from rollmatch.objectives.rollout_matching.supervision import IGNORED, MaskRules, mask_segment

RULES = MaskRules()
C = COORD_IDS[0]


def small_segment(**changes):
    """Prompt 7 8 | prefix 1 c10 2 c20 | tail 3 (desc 4 5) c30 6 EOS; c10 is matched and should be bin 11."""
    ids = (7, 8, 1, C + 10, 2, C + 20, 3, 4, 5, C + 30, 6, EOS_ID)
    supervised = {"coord_positions": (3,), "coord_bins": (11,), "desc_positions": (7, 8)}
    segment = segment_with(ids, sample=sample_of(4), prompt_len=2, prefix_len=4, **supervised)
    return replace(segment, **changes)


def mask(segment, rules=RULES):
    return mask_segment(segment, rules=rules, bin_of=bin_of)


@pytest.mark.scenario(
    "supervision/a-matched-object-is-corrected-in-place",
    clauses=[
        "supervision/prompt-and-prefix-text-are-never-labels#1,2,3",
        "supervision/the-appended-tail-is-learnt-in-full#1,3",
    ],
)
def test_every_position_of_a_small_segment_teaches_what_it_should():
    no = IGNORED
    supervision = mask(small_segment(), MaskRules(desc_ce_weight=0.25))
    assert supervision.labels == (no, no, no, no, no, no, 3, 4, 5, no, 6, EOS_ID)
    assert supervision.weights == (0, 0, 0, 0, 0, 0, 1, 0.25, 0.25, 0, 1, 1)
    assert supervision.coord_positions == (3, 9)
    assert supervision.coord_bins == (11, 30)


def test_polygon_slots_are_all_supervised():
    segment = write_segment(1, num_slots=10)
    supervision = mask(segment)
    tail_bins = [bin_of(i) for i in segment.token_ids[segment.prompt_len + segment.prefix_len :]]
    assert supervision.coord_bins == (*segment.coord_bins, *(b for b in tail_bins if b is not None))


drawn_segments = st.builds(
    lambda seed, num_images, half: write_segment(seed, num_images=num_images, num_slots=2 * half),
    st.integers(0, 10**6),
    st.integers(0, 3),
    st.integers(0, 5),
)
drawn_rules = st.builds(lambda weight: MaskRules(desc_ce_weight=weight), st.sampled_from([0.0, 0.3, 1.0]))


@given(drawn_segments, drawn_rules)
def test_supervision_stays_in_the_target_and_text_in_the_tail(segment, rules):
    supervision = mask(segment, rules)
    tail_start = segment.prompt_len + segment.prefix_len
    for position, (label, weight) in enumerate(zip(supervision.labels, supervision.weights, strict=True)):
        assert (label == IGNORED) == (weight == 0)
        if label != IGNORED:
            assert position >= tail_start
            assert label == segment.token_ids[position]
            assert bin_of(label) is None
    for position in supervision.coord_positions:
        assert segment.prompt_len <= position < segment.encoded_len
        assert bin_of(segment.token_ids[position]) is not None


@pytest.mark.scenario(
    "supervision/the-stop-token-is-a-label", clauses=["supervision/the-appended-tail-is-learnt-in-full#1"]
)
@given(drawn_segments)
def test_every_tail_token_teaches_exactly_one_thing(segment):
    supervision = mask(segment)
    text = {position for position, label in enumerate(supervision.labels) if label != IGNORED}
    tail = range(segment.prompt_len + segment.prefix_len, segment.encoded_len)
    slots = set(supervision.coord_positions) & set(tail)
    assert not text & slots
    assert text | slots == set(tail)
    assert supervision.labels[-1] == EOS_ID


@pytest.mark.scenario(
    "packing/packed-labels-equal-unpacked-labels", clauses=["packing/each-segment-of-a-row-keeps-its-description#4"]
)
@given(st.lists(drawn_segments, min_size=1, max_size=5), drawn_rules)
def test_a_row_is_masked_as_its_segments_are(segments, rules):
    row = make_row(*segments)
    whole = mask_row(row, rules=rules)
    parts = [mask(segment, rules) for segment in segments]
    assert whole.labels == sum((part.labels for part in parts), ())
    assert whole.weights == sum((part.weights for part in parts), ())
    assert whole.coord_bins == sum((part.coord_bins for part in parts), ())
    moved = [o + p for o, part in zip(row.offsets, parts, strict=True) for p in part.coord_positions]
    assert list(whole.coord_positions) == moved
    for offset in row.offsets:  # no segment is scored on the last logit of the one before
        assert whole.labels[offset] == IGNORED
        assert offset not in whole.coord_positions


@pytest.mark.scenario(
    "supervision/a-slot-in-the-prompt-is-refused", clauses=["supervision/prompt-and-prefix-text-are-never-labels#4"]
)
@pytest.mark.parametrize(
    ("changes", "code", "repair"),
    [
        ({"prompt_len": 0}, "prompt-len-out-of-range", {"prompt_len": 1, "prefix_len": 5}),
        ({"prompt_len": 12}, "prompt-len-out-of-range", {"prompt_len": 2}),
        ({"prefix_len": 11, "desc_positions": ()}, "segment-lens-disagree", {"prefix_len": 10}),
        ({"prefix_len": -1}, "segment-lens-disagree", {"prefix_len": 2}),
        ({"coord_bins": (1, 2)}, "segment-lens-disagree", {"coord_bins": (1,)}),
        ({"coord_positions": (1,)}, "supervision-outside-target", {"coord_positions": (3,)}),
        ({"desc_positions": (7, 12)}, "supervision-outside-target", {"desc_positions": (11,)}),
        ({"coord_positions": (9,)}, "slot-outside-prefix", {"coord_positions": (5,)}),
        ({"coord_positions": (6,)}, "slot-outside-prefix", {"coord_positions": (5,)}),
        ({"desc_positions": (5, 7)}, "desc-outside-tail", {"desc_positions": (6, 7)}),
        ({"desc_positions": (8, 8)}, "positions-not-ascending", {"desc_positions": (7, 8)}),
        ({"coord_positions": (5, 3), "coord_bins": (1, 2)}, "positions-not-ascending", {"coord_positions": (3, 5)}),
        ({"coord_positions": (4,)}, "slot-holds-no-coord", {"coord_positions": (5,)}),
        ({"coord_bins": (1000,)}, "slot-bin-out-of-range", {"coord_bins": (999,)}),
        ({"corrected_positions": (2,)}, "segment-lens-disagree", {"corrected_labels": (4,)}),
        (
            {"corrected_positions": (1,), "corrected_labels": (4,)},
            "supervision-outside-target",
            {"corrected_positions": (2,)},
        ),
        ({"coord_bins": (-1,)}, "slot-bin-out-of-range", {"coord_bins": (0,)}),
    ],
)
def test_a_segment_that_breaks_a_rule_is_refused_and_its_repair_accepted(changes, code, repair):
    with refused(code, "train.jsonl:5"):
        mask(small_segment(**changes))
    mask(small_segment(**(changes | repair)))
