"""The figures of ``rollmatch eval``: COCO's AP with scores from token probabilities, F1, crowds, classes."""

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.doubles.answers import answer, element, ids
from conformance.doubles.records import make_rollout, make_sample
from conformance.doubles.tokenizer import make_vocabulary
from rollmatch.objectives.rollout_matching.average_precision import DetectedBox, TrueBox, average_precision
from rollmatch.objectives.rollout_matching.detection import Answered, judge_detection, object_scores
from rollmatch.objectives.rollout_matching.match import MatchRules
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.objectives.rollout_matching.target import tokens_in
from rollmatch.records import Geometry, GroundTruth, ParsedRollout, PredictedObject

VOCABULARY = make_vocabulary()
NEAR, FAR = (100, 100, 300, 300), (600, 600, 900, 900)


def objects(cls, pairs, **fields):
    return tuple(cls(desc=desc, geometry=Geometry.BBOX, bins=bins, **fields) for desc, bins in pairs)


def answered(truth, predicted, *, scores=None, metadata=None):
    found = objects(PredictedObject, predicted, positions=(0, 1, 2, 3))
    size = {"width": 1000, "height": 1000}
    sample = make_sample(*objects(GroundTruth, truth), images=("a.png",), **size, metadata=metadata or {})
    parsed = ParsedRollout(
        prefix_token_ids=(),
        cut_head=b"",
        prefix_text="",
        drops={},
        num_elements=len(found),
        objects=found,
        truncated=False,
        invalid=False,
    )
    return Answered(sample=sample, parsed=parsed, scores=tuple(scores or [1.0] * len(found)))


def judged(*answers):
    return judge_detection(answers, MatchRules())


def test_figures_of_places_descriptions_and_answers_are_told_apart():
    loose = (600, 600, 900, 800)
    one = answered([("cat", NEAR), ("dog", FAR)], [("cat", NEAR), ("cat", loose), ("owl", (0, 0, 50, 50))])
    other = answered([("dog", NEAR)], [])
    other = replace(other, parsed=replace(other.parsed, invalid=True, truncated=True))
    figures = judged(one, other, answered([], []))
    expected = {"duplicate_rate": 0.0, "unknown_desc_rate": 1 / 3, "invalid_rate": 1 / 3, "truncated_rate": 1 / 3}
    for iou, num_matched in ((0.5, 2), (0.75, 1), (0.9, 1)):
        share = num_matched / 3
        expected |= {f"precision@{iou}": share, f"recall@{iou}": share, f"f1@{iou}": share, f"f1_desc@{iou}": 1 / 3}
    assert {name: figures.metrics[name] for name in expected} == pytest.approx(expected)
    assert figures.metrics["num_images"] == 3.0
    numbers = {
        desc: [each[name] for name in ("F1", "num_truth", "num_predicted")] for desc, each in figures.by_desc.items()
    }
    assert numbers == {"cat": [2 / 3, 1, 2], "dog": [0.0, 2, 0]}


@pytest.mark.parametrize(("box", "num_wrong"), [((500, 600, 700, 800), 0), ((499, 600, 700, 800), 1), (FAR, 0)])
def test_half_of_a_prediction_in_a_crowd_region_is_enough(box, num_wrong):
    crowd = {"crowd": [{"desc": "cat", "bbox_2d": list(FAR)}, {"desc": "cat", "poly": [0] * 6}]}
    figures = judged(answered([("cat", NEAR)], [("cat", NEAR), ("cat", box)], metadata=crowd))
    assert figures.by_desc["cat"]["num_predicted"] == 1 + num_wrong
    assert figures.metrics["precision@0.5"] == 1 / (1 + num_wrong)


@pytest.mark.parametrize(("bottom", "num_repeated"), [(280, 1), (279, 0)])
def test_a_box_of_the_same_description_from_an_iou_of_nine_tenths_repeats(bottom, num_repeated):
    near = (100, 100, 300, bottom)
    for predicted in ([("cat", NEAR), ("cat", near)], [("cat", near), ("cat", NEAR), ("dog", NEAR)]):
        metrics = judged(answered([("cat", NEAR)], predicted)).metrics
        assert metrics["duplicate_rate"] == num_repeated / len(predicted)


def test_each_description_has_its_own_average_precision():
    truth = [
        TrueBox(image=1, desc="cat", box=(10, 20, 110, 70), area=5000),
        TrueBox(image=0, desc="dog", box=(0, 0, 50, 50), area=2500),
        TrueBox(image=0, desc="owl", box=(0, 0, 50, 50), area=2500),
    ]
    found = [
        DetectedBox(image=1, desc="cat", box=(10, 20, 90, 70), score=0.5),
        DetectedBox(image=0, desc="dog", box=(0, 0, 50, 50), score=0.5),
        DetectedBox(image=0, desc="cow", box=(0, 0, 50, 50), score=0.5),
    ]
    assert average_precision(truth, found, num_images=2).by_desc == {
        "cat": {"AP": pytest.approx(0.7), "AP50": 1.0, "AR_100": pytest.approx(0.7)},
        "dog": {"AP": 1.0, "AP50": 1.0, "AR_100": 1.0},
        "owl": {"AP": 0.0, "AP50": 0.0, "AR_100": 0.0},
    }


def test_what_is_found_exactly_counts_in_full():
    figures = judged(answered([("cat", NEAR), ("dog", FAR)], [("cat", NEAR), ("dog", FAR)]))
    assert {figures.metrics[name] for name in ("AP", "AP50", "AP75", "AR_100", "f1@0.9", "f1_desc@0.5")} == {1.0}
    assert figures.metrics["AP_small"] is None
    assert figures.by_desc["dog"] == {"AP": 1, "AP50": 1, "AR_100": 1, "F1": 1, "num_truth": 1, "num_predicted": 1}


@pytest.mark.scenario(
    "observability/a-wrong-box-costs-by-its-rank", clauses=["observability/detection-is-judged-as-coco-does#1"]
)
def test_scores_rank_the_predictions():
    """A wrong box that is less certain than the right one costs no AP; more certain, it halves the precision."""
    one = {"truth": [("cat", NEAR)], "predicted": [("cat", FAR), ("cat", NEAR)]}
    sure, unsure = judged(answered(**one, scores=[0.1, 0.9])), judged(answered(**one, scores=[0.9, 0.1]))
    assert (sure.metrics["AP"], unsure.metrics["AP"]) == (1.0, pytest.approx(0.5))
    assert sure.metrics["AP_constant_score"] == unsure.metrics["AP_constant_score"] == pytest.approx(0.5)
    assert sure.metrics["f1@0.5"] == unsure.metrics["f1@0.5"] == pytest.approx(2 / 3)


@pytest.mark.scenario(
    "observability/a-crowd-region-forgives", clauses=["observability/detection-is-judged-as-coco-does#2"]
)
@pytest.mark.parametrize(("desc", "ap", "f1"), [("cat", 1.0, 1.0), ("dog", 1.0, 2 / 3)])
def test_predictions_in_a_crowd_region_of_their_description_are_not_wrong(desc, ap, f1):
    inside = (650, 650, 700, 700)
    crowd = {"crowd": [{"desc": desc, "bbox_2d": list(FAR)}]}
    figures = judged(answered([("cat", NEAR)], [("cat", inside), ("cat", NEAR)], metadata=crowd))
    without = judged(answered([("cat", NEAR)], [("cat", inside), ("cat", NEAR)]))
    assert (without.metrics["AP"], without.metrics["f1@0.5"]) == (pytest.approx(0.5), pytest.approx(2 / 3))
    assert figures.metrics["f1@0.5"] == pytest.approx(f1)
    if desc == "cat":
        assert figures.metrics["AP"] == ap


def test_areas_of_masks_decide_what_is_small():
    whole, masked = (answered([("cat", NEAR)], [], metadata=m) for m in ({}, {"areas": [900.0]}))
    for one, sizes in ((whole, (None, 0.0)), (masked, (0.0, None))):
        metrics = judged(one).metrics
        assert (metrics["AP_small"], metrics["AP_large"]) == sizes


def test_a_description_beside_the_true_ones_and_a_repeated_box_are_reported():
    predicted = [("cat", NEAR), ("cat", NEAR), ("cow", FAR), ("cow", NEAR), ("cow", FAR)]
    metrics = judged(answered([("cat", NEAR)], predicted)).metrics
    assert (metrics["duplicate_rate"], metrics["unknown_desc_rate"]) == (2 / 5, 3 / 5)
    assert metrics["AP"] == 1.0
    assert metrics["f1@0.5"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("truth", "ap"), [([], None), ([("cat", NEAR)], 0.0)])
def test_images_without_objects_and_answers_without_predictions(truth, ap):
    metrics = judged(answered(truth, [])).metrics
    assert (metrics["AP"], metrics["f1@0.5"]) == (ap, 0.0)
    assert json.loads(json.dumps(metrics)) == metrics


def test_more_objects_in_one_image_than_coco_looks_at():
    boxes = [("cat", (x * 60, y * 60, x * 60 + 50, y * 60 + 50)) for x in range(16) for y in range(16)][:250]
    metrics = judged(answered(boxes, boxes)).metrics
    assert metrics["f1@0.9"] == 1.0
    assert metrics["AR_100"] == pytest.approx(0.4), "COCO looks at 100 detections of an image and class"


@given(st.integers(0, 10_000))
def test_the_order_of_equal_images_does_not_matter_for_scores_that_differ(seed):
    chance = random.Random(seed)
    truth = [TrueBox(image=i, desc="cat", box=(0, 0, 50, 50), area=2500) for i in range(4)]
    found = [
        DetectedBox(image=i, desc="cat", box=(0, 0, 50, chance.randrange(20, 60)), score=(i + 1) / 8) for i in range(4)
    ]
    whole = average_precision(truth, found, num_images=4).summary
    chance.shuffle(found)
    assert average_precision(truth, found, num_images=4).summary == whole


def rollout_of(text, probability_of):
    """A response whose tokens have the probability that ``probability_of`` gives to their text."""
    token_ids = tuple(ids(text))
    logprobs = [math.log(probability_of(VOCABULARY.text([token]))) for token in token_ids]
    return make_rollout(token_ids, response_logprobs=(*logprobs, 0.0))


def scores_of(text, probability_of):
    rollout = rollout_of(text, probability_of)
    return object_scores(parse_rollout(rollout.response_token_ids, VOCABULARY).objects, rollout, VOCABULARY)


def test_a_score_is_the_geometric_mean_of_description_and_coordinates():
    text = answer(element(1, 2, 30, 40, desc="k"), element(5, 6, 70, 80, desc="k"))
    sampled = {f"<|coord_{k}|>": 0.25 for k in (1, 2, 30, 40)}
    assert scores_of(text, lambda piece: sampled.get(piece, 1.0)) == (pytest.approx(0.25 ** (4 / 5)), 1.0)
    assert scores_of(text, lambda piece: 0.5 if "k" in piece else 1.0) == pytest.approx((0.5 ** (1 / 5),) * 2)
    assert scores_of(text, lambda piece: 1.0 if "k" in piece or "coord" in piece else 0.5) == (1.0, 1.0)


def test_without_probabilities_all_scores_are_one():
    text = answer(element(1, 2, 30, 40))
    parsed = parse_rollout(ids(text), VOCABULARY)
    bare = replace(rollout_of(text, lambda piece: 0.5), response_logprobs=None)
    assert object_scores(parsed.objects, bare, VOCABULARY) == (1.0,)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=9), st.data())
def test_tokens_in_a_span_are_those_that_share_a_byte(lengths, data):
    starts = [sum(lengths[:place]) for place in range(len(lengths) + 1)]
    low = data.draw(st.integers(0, starts[-1] - 1))
    high = data.draw(st.integers(low + 1, starts[-1]))
    expected = [t for t in range(len(lengths)) if set(range(starts[t], starts[t + 1])) & set(range(low, high))]
    assert tokens_in([(low, high)], starts) == expected
