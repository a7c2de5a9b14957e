"""Rewards for boxes, against COCO's IoU and SciPy's assignment."""

import json
import random

import numpy as np
import pytest
from pycocotools import mask as coco_mask
from scipy.optimize import linear_sum_assignment

from rollmatch.records import Geometry, GroundTruth, Sample
from rollmatch.rewards.detection import f1, mean_iou, no_duplicates, read, well_formed

NAMES = ("cat", "dog")


def random_boxes(rng, num):
    boxes = []
    for _ in range(num):
        left, top = rng.randint(0, 700), rng.randint(0, 700)
        boxes.append((rng.choice(NAMES), (left, top, left + rng.randint(20, 299), top + rng.randint(20, 299))))
    return boxes


def moved(rng, boxes):
    """Most of the boxes a little elsewhere, and some others."""
    near = [(name, tuple(k + rng.randint(-9, 9) * (k > 9) for k in box)) for name, box in boxes if rng.random() < 0.8]
    found = near + random_boxes(rng, rng.randint(0, 2))
    rng.shuffle(found)
    return found


def sample_of(boxes):
    objects = [GroundTruth(desc=name, geometry=Geometry.BBOX, bins=box) for name, box in boxes]
    return Sample(sample_id=0, origin="x:1", images=(), objects=tuple(objects))


def written(boxes):
    return json.dumps({"objects": [{"desc": name, "bbox_2d": list(box)} for name, box in boxes]})


def coco_ious(found, truth):
    """[P, G] by pycocotools, which takes left, top, width and height."""
    sides = [[[x1, y1, x2 - x1, y2 - y1] for _, (x1, y1, x2, y2) in boxes] for boxes in (found, truth)]
    return np.asarray(coco_mask.iou(*(np.array(side, dtype=np.float64) for side in sides), [0] * len(truth)))


@pytest.mark.scenario(clauses=["grpo-server-mode/rewards-for-boxes-are-those-of-the-field#1,2"])
@pytest.mark.parametrize("seed", range(20))
def test_boxes_are_judged_as_coco_and_scipy_judge_them(seed):
    rng = random.Random(seed)
    truth = random_boxes(rng, rng.randint(1, 6))
    found = moved(rng, truth) or random_boxes(rng, 1)
    ious = coco_ious(found, truth)
    pairs = list(zip(*linear_sum_assignment(-ious), strict=True))
    expected = sum(ious[pair] for pair in pairs) / max(len(found), len(truth))
    assert mean_iou(written(found), sample_of(truth)) == pytest.approx(expected, abs=1e-9)
    gated = np.where(ious >= 0.5, ious, 0)
    taken = [pair for pair in zip(*linear_sum_assignment(-gated), strict=True) if gated[pair]]
    right = sum(found[mine][0] == truth[true][0] for mine, true in taken)
    assert f1(written(found), sample_of(truth)) == pytest.approx(2 * right / (len(found) + len(truth)))


TRUTH = [("cat", (100, 100, 300, 300)), ("dog", (500, 500, 800, 900))]


@pytest.mark.parametrize(
    "answer",
    [
        written(TRUTH),
        '{"objects": [{"desc": "cat", "bbox_2d": ["<|coord_100|>", "<|coord_100|>", "<|coord_300|>", "<|coord_300|>"]},'
        ' {"desc": "dog", "bbox_2d": [500, 500, 800, 900]}]}',
        '```json\n[\n\t{"bbox_2d": [100, 100, 300, 300], "label": "cat"},\n\t'
        '{"bbox_2d": [501, 501, 801, 901], "label": "dog"}\n]\n```',
        '[{"bbox_2d": [100, 100, 300, 300], "label": "cat"}, {"bbox_2d": [501, 501, 801, 901], "label": "dog"}]',
        "<think>Two animals [1, 2].</think>\n" + written(TRUTH),
    ],
)
def test_each_way_to_write_an_answer_earns_all(answer):
    rewards = [reward(answer, sample_of(TRUTH)) for reward in (f1, mean_iou, well_formed, no_duplicates)]
    assert rewards == [1.0] * 4
    assert [each.desc for each in read(answer).objects] == ["cat", "dog"]


@pytest.mark.scenario(
    "grpo-server-mode/what-is-wrong-costs-where-it-is-wrong",
    clauses=["grpo-server-mode/rewards-for-boxes-are-those-of-the-field#3,4"],
)
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("I see a cat.", (0.0, 0.0, 0.0, 1.0)),
        (written(TRUTH)[:-2], (1.0, 1.0, 0.0, 1.0)),  # cut
        (written(TRUTH) + " Done.", (1.0, 1.0, 0.0, 1.0)),
        (written([TRUTH[0], ("dog", TRUTH[1][1][::-1])]), (2 / 3, 0.5, 0.0, 1.0)),  # an empty box is no prediction
        (written([*TRUTH, TRUTH[0], TRUTH[0]]), (4 / 6, 0.5, 1.0, 0.5)),
        (written([("dog", TRUTH[0][1]), TRUTH[1]]), (0.5, 1.0, 1.0, 1.0)),
        (written([]), (0.0, 0.0, 1.0, 1.0)),
    ],
)
def test_what_is_wrong_costs_where_it_is_wrong(answer, expected):
    rewards = tuple(reward(answer, sample_of(TRUTH)) for reward in (f1, mean_iou, well_formed, no_duplicates))
    assert rewards == pytest.approx(expected)


def test_an_empty_image_wants_an_empty_list():
    assert (f1(written([]), sample_of([])), mean_iou(written([]), sample_of([]))) == (1.0, 1.0)
    assert (f1(written(TRUTH), sample_of([])), mean_iou(written(TRUTH), sample_of([]))) == (0.0, 0.0)
