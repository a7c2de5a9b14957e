"""Rollouts in, segments out, whatever the model wrote."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.answers import FAR_BOX, answer, box, element, ids, object_lists, responses
from conformance.doubles.records import make_rollout, make_sample
from conformance.doubles.refusals import refused
from conformance.doubles.tokenizer import make_vocabulary
from rollmatch.objectives.rollout_matching.answer_format import DropReason
from rollmatch.objectives.rollout_matching.match import MatchRules, TransportRules
from rollmatch.objectives.rollout_matching.objective import summarize
from rollmatch.objectives.rollout_matching.supervision import MaskRules, mask_segment
from rollmatch.objectives.rollout_matching.target import RolloutMatching, RolloutReport, serialize_objects

VOCABULARY = make_vocabulary()
PROMPT = (1, 2, 3)
MATCHING = RolloutMatching(VOCABULARY, MatchRules(), TransportRules())


def sample(*objects):
    return make_sample(*objects, origin="train.jsonl:4")


def rollout(response):
    return make_rollout(tuple(response), prompt_token_ids=PROMPT, policy_version=7)


def make(response, *objects):
    segments, reports = MATCHING.make_segments([sample(*objects)], [rollout(response)])
    return segments[0], reports[0]


def target_text(segment):
    assert segment.token_ids[-1] == VOCABULARY.stop_id
    return VOCABULARY.decode(segment.token_ids[segment.prompt_len : -1]).decode()


@pytest.mark.scenario(
    "target/one-object-found-and-one-missed",
    clauses=["target/the-target-is-the-prefix-the-missed-objects-and-the-end#1,3,4,5"],
)
def test_a_matched_box_learns_the_true_bins_and_a_missed_one_is_appended():
    true, missed = box(110, 90, 305, 310), box(*FAR_BOX, desc="two")
    segment, report = make(ids(answer(element())), missed, true)
    assert segment.token_ids[:3] == PROMPT
    assert target_text(segment) == answer(element(), element(*FAR_BOX, desc="two"))
    assert segment.coord_bins == true.bins
    slots = [VOCABULARY.bin_of(segment.token_ids[position]) for position in segment.coord_positions]
    assert slots == [100, 100, 300, 300]
    desc = [VOCABULARY.piece(segment.token_ids[position]) for position in segment.desc_positions]
    assert b"".join(desc) == b"two"
    assert min(segment.desc_positions) >= segment.prompt_len + segment.prefix_len
    assert (segment.policy_version, segment.sample.origin) == (7, "train.jsonl:4")
    assert (report.num_predicted, report.num_truth, report.num_matched, report.appended) == (1, 2, 1, 1)
    assert (report.num_desc_correct, report.gating_rejections) == (1, 1)
    assert (report.response_len, report.prefix_len) == (len(ids(answer(element()))), segment.prefix_len)
    _, report = make(ids(answer(element(desc="two"))), box(desc="seven"))
    assert (report.num_matched, report.num_desc_correct, report.iou_sum) == (1, 0, 1.0)


@pytest.mark.scenario(
    "supervision/a-false-positive-teaches-nothing",
    clauses=[
        "supervision/prompt-and-prefix-text-are-never-labels#2",
        "target/every-target-is-json-with-every-true-object-once#3",
    ],
)
def test_false_positives_are_context_without_slots():
    segment, report = make(ids(answer(element(), element(*FAR_BOX))), box(*FAR_BOX))
    assert segment.coord_bins == FAR_BOX
    assert (report.num_predicted, report.num_matched) == (2, 1)
    assert target_text(segment) == answer(element(), element(*FAR_BOX))


@pytest.mark.scenario(
    "target/any-response-leads-to-whole-json", clauses=["target/every-target-is-json-with-every-true-object-once#1,2"]
)
@given(responses(), object_lists())
def test_any_rollout_gives_a_whole_answer_with_every_true_object_once(response, truth):
    segment, report = make(response, *truth)
    whole = json.loads(target_text(segment), object_pairs_hook=lambda pairs: pairs)
    assert [key for key, _ in whole] == ["objects"]
    appended = whole[0][1][len(whole[0][1]) - report.appended :]
    assert all(len({key for key, _ in pairs}) == len(pairs) == 2 for pairs in appended)
    assert report.num_matched + report.appended == report.num_truth == len(truth)
    written = [(json.dumps(dict(pairs), ensure_ascii=False)) for pairs in appended]
    wanted = [serialize_objects([each])[len('{"objects": [') : -2] for each in truth]
    rest = iter(wanted)
    assert all(each in rest for each in written)  # a subsequence: ground truth order, none twice


@given(responses(), object_lists())
def test_any_rollout_gives_aligned_slots(response, truth):
    segment, report = make(response, *truth)
    prefix_end = segment.prompt_len + segment.prefix_len
    assert segment.prompt_len == len(PROMPT)
    assert len(segment.coord_positions) == len(segment.coord_bins)
    assert list(segment.coord_positions) == sorted(set(segment.coord_positions))
    assert all(segment.prompt_len <= position < prefix_end for position in segment.coord_positions)
    assert all(VOCABULARY.bin_of(segment.token_ids[position]) is not None for position in segment.coord_positions)
    assert all(prefix_end <= position < segment.encoded_len - 1 for position in segment.desc_positions)
    assert all(0 <= k <= 999 for k in segment.coord_bins)
    assert report.prefix_len == segment.prefix_len


def test_samples_without_their_rollouts_are_an_error():
    with refused("rollouts-misaligned", "rollouts"):
        MATCHING.make_segments([sample()] * 2, [rollout(())])
    assert MATCHING.make_segments([sample()], [rollout(())])


@pytest.mark.scenario(
    "target/a-description-that-spells-the-stop-token",
    "target/a-description-that-the-tokenizer-rewrites",
    "target/a-plain-description-is-accepted",
    clauses=["target/a-description-that-would-turn-into-special-tokens-is-refused#1,2"],
)
@pytest.mark.parametrize(
    ("desc", "code", "good"),
    [("<|im_end|>", "desc-holds-added-token", "end"), ("e\u0301", "desc-changed-by-tokenizer", "\u00e9")],
)
def test_an_error_about_a_description_names_the_sample(desc, code, good):
    with refused(code, "train.jsonl:4"):
        make(ids(""), box(desc=desc))
    assert make(ids(""), box(desc=good))


COUNTS = ("num_predicted", "num_truth", "num_matched", "num_desc_correct", "iou_sum", "response_len", "prefix_len")
EMPTY = RolloutReport(
    **dict.fromkeys((*COUNTS, "appended", "gating_rejections"), 0), drops={}, invalid=False, truncated=False
)
FOUND = {"num_predicted": 4, "num_truth": 2, "num_matched": 2, "num_desc_correct": 1, "iou_sum": 1.5}
REPORT = replace(EMPTY, **FOUND, drops={"malformed": 1}, truncated=True, response_len=9, prefix_len=8)


@pytest.mark.scenario(
    "observability/sums-come-before-ratios",
    "observability/dropped-objects-are-counted-by-name",
    clauses=["observability/quality-is-measured-by-counts#1,2,3"],
)
def test_figures_come_from_summed_counts():
    missed_all = replace(EMPTY, num_truth=2, invalid=True, drops={"malformed": 2, "wrong_arity": 1})
    figures = summarize([REPORT, missed_all, EMPTY, EMPTY])
    ratios = {"precision": 2 / 4, "recall": 2 / 4, "f1": 4 / 8, "f1_desc": 2 / 8, "mean_iou": 0.75}
    rates = {"invalid_rate": 0.25, "truncated_rate": 0.25, "drop/malformed": 3.0, "drop/wrong_arity": 1.0}
    expected = ratios | rates
    assert {name: figures[name] for name in expected} == expected


def test_nothing_over_nothing_is_zero_and_the_keys_are_always_the_same():
    assert set(summarize([]).values()) == {0.0}
    assert set(summarize([EMPTY]).values()) == {0.0}
    assert summarize([]).keys() == summarize([REPORT]).keys()
    assert {f"drop/{reason}" for reason in DropReason} <= summarize([]).keys()


@pytest.mark.scenario("supervision/the-stop-token-is-a-label")
@given(responses(), object_lists(), st.sampled_from([0.0, 1.0]))
def test_the_stop_token_is_a_label_whatever_was_written_and_missed(response, objects, desc_ce_weight):
    segment, _ = make(response, *objects)
    rules = MaskRules(desc_ce_weight=desc_ce_weight)
    supervision = mask_segment(segment, rules=rules, bin_of=VOCABULARY.bin_of)
    assert (supervision.labels[-1], supervision.weights[-1]) == (VOCABULARY.stop_id, 1.0)
    assert VOCABULARY.stop_id not in supervision.labels[:-1]
