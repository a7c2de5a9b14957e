"""Rewards of 0 to 1 for an answer that lists the objects of an image, whose sample has the true ones.

An answer is read by the parser of rollout matching, which repairs nothing: Qwen3-VL's fenced list with coordinates from
0 to 1000, or an object with ``objects`` and bins from 0 to 999, as numbers or as coordinate tokens. Pixels, as
Qwen2.5-VL writes them, are not read: their scale is not in the answer. Overlap is that of boxes; a polygon counts as
the box around it.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from rollmatch.data.geometry import box_around
from rollmatch.objectives.rollout_matching.answer_format import INTEGERS, QWEN3_VL
from rollmatch.objectives.rollout_matching.detection import count_duplicates
from rollmatch.objectives.rollout_matching.match import MatchRules, PairScores, box_ious, match_objects
from rollmatch.objectives.rollout_matching.parse import parse_rollout
from rollmatch.records import GroundTruth, Matching, ParsedRollout, PredictedObject, Sample

F1_IOU = 0.5
"""Least IoU of a right box."""
_FORMATS = {"```": QWEN3_VL, "[": replace(QWEN3_VL, opening_marks=("[",), closing_marks=("]",))}
"""How an answer begins -> its format; else it is an object."""
_COORD_TOKEN = re.compile(r'"<\|coord_(\d+)\|>"')


def f1(answer: str, sample: Sample) -> float:
    """F1 of boxes that overlap a true one by half or more and have its description; one to one.

    >>> from rollmatch.records import Geometry
    >>> cat = '{"desc": "cat", "bbox_2d": [0, 0, 500, 500]}'
    >>> true = GroundTruth(desc="cat", geometry=Geometry.BBOX, bins=(0, 0, 500, 400))
    >>> sample = Sample(sample_id=0, origin="x:1", images=(), objects=(true, true))
    >>> round(f1('{"objects": [' + cat + ']}', sample), 4)
    0.6667
    """
    found, truth = read(answer).objects, sample.objects
    matching = _match(found, truth, MatchRules(maskiou_gate=F1_IOU))
    right = sum(found[mine].desc == truth[true].desc for mine, true in matching.pairs)
    return _share(2 * right, len(found) + len(truth))


def mean_iou(answer: str, sample: Sample) -> float:
    """Sum of the IoUs of the best assignment, divided by the predicted or the true objects, whichever are more.

    Descriptions do not count; an object too many costs as much as one too few.
    """
    found, truth = read(answer).objects, sample.objects
    matching = _match(found, truth, MatchRules(maskiou_gate=0.0))
    return _share(sum(matching.ious), max(len(found), len(truth)))


def well_formed(answer: str, sample: Sample) -> float:
    """1 for an answer that is one whole list of objects without an error, else 0."""
    parsed = read(answer)
    return float(not (parsed.invalid or parsed.truncated or parsed.drops))


def no_duplicates(answer: str, sample: Sample) -> float:
    """Share of the boxes that repeat no earlier one of the same description (IoU 0.9 or more); 1 without boxes."""
    found = read(answer).objects
    return 1.0 - count_duplicates(found) / max(1, len(found))


def read(answer: str) -> ParsedRollout:
    """What an answer lists, in bins.

    >>> read('[{"bbox_2d": [0, 501, 1000, 502], "label": "cat"}]').objects[0].bins
    (0, 500, 999, 501)
    >>> read('{"objects": [{"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", 9, 9]}]').objects[0].bins
    (1, 2, 9, 9)
    """
    text = _COORD_TOKEN.sub(r"\1", answer.rpartition("</think>")[2].lstrip())
    answer_format = next((form for mark, form in _FORMATS.items() if text.startswith(mark)), INTEGERS)
    return parse_rollout(text.encode(), _Bytes(), answer_format)


class _Bytes:
    """A vocabulary whose tokens are bytes."""

    control_ids: frozenset[int] = frozenset()

    def piece(self, token_id: int) -> bytes:
        return bytes([token_id])

    def decode(self, token_ids: Iterable[int]) -> bytes:
        return bytes(token_ids)

    def bin_of(self, token_id: int) -> int | None:
        return None


def _match(found: Sequence[PredictedObject], truth: Sequence[GroundTruth], rules: MatchRules) -> Matching:
    if not found or not truth:
        return match_objects(found, truth, rules)
    boxes, true_boxes = (np.array([box_around(each.bins) for each in objects]) for objects in (found, truth))
    ious = box_ious(boxes, true_boxes)
    return match_objects(found, truth, rules, PairScores(np.ones(ious.shape, dtype=np.bool_), ious))


def _share(part: float, whole: int) -> float:
    """1 where there is nothing to find and nothing was found."""
    return part / whole if whole else 1.0
