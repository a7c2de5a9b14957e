"""Judge the rollouts of a detection data set: COCO's AP, and F1 of one-to-one matches at several IoUs, by class.

An object's score is the geometric mean of the probabilities of its description's and its coordinates' tokens; the JSON
around them does not count. Long descriptions and polygons are not at a disadvantage, as in a product they were.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from rollmatch.data.formats.native import to_pixels
from rollmatch.data.geometry import box_around
from rollmatch.model.vocabulary import Vocabulary
from rollmatch.objectives.rollout_matching.average_precision import (
    Box,
    DetectedBox,
    TrueBox,
    average_precision,
)
from rollmatch.objectives.rollout_matching.match import MatchRules, box_ious, match_objects, score_pairs
from rollmatch.objectives.rollout_matching.target import tokens_in
from rollmatch.records import Matching, ParsedRollout, PredictedObject, Rollout, Sample

F1_IOUS = (0.5, 0.75, 0.9)
CROWD_COVERS = 0.5
"""Share of an unmatched prediction inside a crowd region of its description from which it is not counted as wrong."""
SAME_BOX = 0.9
"""IoU with an earlier box of the same description from which a prediction is a duplicate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A sample and what the model said about it."""

    sample: Sample
    parsed: ParsedRollout
    scores: tuple[float, ...]
    """[len(parsed.objects)] as ``object_scores`` returns them."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.sample.width, self.sample.height


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionFigures:
    """What an evaluation reports."""

    metrics: dict[str, float | None]
    by_desc: dict[str, dict[str, float | int | None]]
    curve: tuple[float, ...]
    """[101] precision at IoU 0.5 by recall, as ``AveragePrecision``."""
    drops: dict[str, int]
    """Why objects of responses were dropped -> their number."""


def object_scores(objects: Sequence[PredictedObject], rollout: Rollout, vocabulary: Vocabulary) -> tuple[float, ...]:
    """[len(objects)] scores in 0..1, all 1 where the rollout has no log-probabilities."""
    logprobs = rollout.response_logprobs
    if logprobs is None:
        return (1.0,) * len(objects)
    ids = rollout.response_token_ids
    starts = list(accumulate((len(vocabulary.piece(token_id)) for token_id in ids), initial=0))
    found = []
    for each in objects:
        tokens = tokens_in([*each.spans, each.desc_span], starts)
        found.append(math.exp(math.fsum(logprobs[token] for token in tokens) / len(tokens)))
    return tuple(found)


def judge_detection(answers: Sequence[Answered], rules: MatchRules) -> DetectionFigures:
    """Figures of all answers; ``rules`` with another gate for each IoU of ``F1_IOUS``."""
    truth = [box for image, one in enumerate(answers) for box in _true_boxes(image, one)]
    detected = [box for image, one in enumerate(answers) for box in _detected_boxes(image, one)]
    scored = average_precision(truth, detected, len(answers))
    constant = average_precision(truth, [replace(box, score=1.0) for box in detected], len(answers))
    counts = _count(answers, rules)
    known = {box.desc for box in truth}
    metrics: dict[str, float | None] = {
        **scored.summary,
        **{f"{name}_constant_score": constant.summary[name] for name in ("AP", "AP50")},
        **{name: value for iou, count in counts.items() for name, value in count.figures(iou).items()},
        "duplicate_rate": _ratio(sum(count_duplicates(one.parsed.objects) for one in answers), len(detected)),
        "unknown_desc_rate": _ratio(sum(box.desc not in known for box in detected), len(detected)),
        "invalid_rate": _ratio(sum(one.parsed.invalid for one in answers), len(answers)),
        "truncated_rate": _ratio(sum(one.parsed.truncated for one in answers), len(answers)),
        "num_images": float(len(answers)),
    }
    by_desc = {desc: figures | counts[F1_IOUS[0]].of(desc) for desc, figures in scored.by_desc.items()}
    drops = sum((Counter(one.parsed.drops) for one in answers), Counter[str]())
    return DetectionFigures(
        metrics=metrics,
        by_desc=by_desc,
        curve=scored.curve,
        drops={str(reason): count for reason, count in drops.most_common()},
    )


class Counts:
    """True, predicted and matched objects, by description. Predictions in crowd regions are left out."""

    def __init__(self) -> None:
        self.truth: Counter[str] = Counter()
        self.predicted: Counter[str] = Counter()
        self.correct: Counter[str] = Counter()
        """Matched, and described as the true object is."""
        self.num_matched = 0

    def add(self, one: Answered, matching: Matching) -> None:
        """Count one answer."""
        objects, truth, crowds = one.parsed.objects, one.sample.objects, _crowds(one.sample)
        ignored = {index for index in matching.false_positives if _is_in_crowd(objects[index], crowds)}
        right = [truth[true].desc for mine, true in matching.pairs if objects[mine].desc == truth[true].desc]
        self.truth.update(each.desc for each in truth)
        self.predicted.update(each.desc for index, each in enumerate(objects) if index not in ignored)
        self.correct.update(right)
        self.num_matched += len(matching.pairs)

    def figures(self, iou: float) -> dict[str, float]:
        """Precision and recall count places alone; ``f1_desc`` wants the right description, too."""
        num_truth, num_predicted = self.truth.total(), self.predicted.total()
        return {
            f"precision@{iou}": _ratio(self.num_matched, num_predicted),
            f"recall@{iou}": _ratio(self.num_matched, num_truth),
            f"f1@{iou}": _ratio(2 * self.num_matched, num_predicted + num_truth),
            f"f1_desc@{iou}": _ratio(2 * self.correct.total(), num_predicted + num_truth),
        }

    def of(self, desc: str) -> dict[str, float | int | None]:
        """F1 and numbers of one description."""
        num_truth, num_predicted = self.truth[desc], self.predicted[desc]
        f1 = _ratio(2 * self.correct[desc], num_truth + num_predicted)
        return {"F1": f1, "num_truth": num_truth, "num_predicted": num_predicted}


def _count(answers: Sequence[Answered], rules: MatchRules) -> dict[float, Counts]:
    """By IoU; the pairs of an answer are compared once."""
    counts = {iou: Counts() for iou in F1_IOUS}
    for one in answers:
        objects, truth = one.parsed.objects, one.sample.objects
        scores = score_pairs(objects, truth, rules) if objects and truth else None
        for iou, so_far in counts.items():
            so_far.add(one, match_objects(objects, truth, replace(rules, maskiou_gate=iou), scores))
    return counts


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _true_boxes(image: int, one: Answered) -> list[TrueBox]:
    areas = one.sample.metadata.get("areas")
    known: Sequence[float] = areas if isinstance(areas, list) and len(areas) == len(one.sample.objects) else ()
    boxes = [(each.desc, _pixels(box_around(each.bins), one.size)) for each in one.sample.objects]
    found = [
        TrueBox(image=image, desc=desc, box=box, area=known[place] if known else _area(box))
        for place, (desc, box) in enumerate(boxes)
    ]
    crowds = [(desc, _pixels(bins, one.size)) for desc, bins in _crowds(one.sample)]
    return found + [TrueBox(image=image, desc=d, box=box, area=_area(box), is_crowd=True) for d, box in crowds]


def _detected_boxes(image: int, one: Answered) -> list[DetectedBox]:
    return [
        DetectedBox(image=image, desc=each.desc, box=_pixels(box_around(each.bins), one.size), score=score)
        for each, score in zip(one.parsed.objects, one.scores)
    ]


def _crowds(sample: Sample) -> list[tuple[str, tuple[int, ...]]]:
    """(description, box in bins) of the crowd regions that a conversion has kept in ``metadata.crowd``."""
    regions: Sequence[Mapping[str, Any]] = sample.metadata.get("crowd", ())
    return [(str(region["desc"]), tuple(region["bbox_2d"])) for region in regions if "bbox_2d" in region]


def _is_in_crowd(each: PredictedObject, crowds: Sequence[tuple[str, tuple[int, ...]]]) -> bool:
    box = box_around(each.bins)
    return any(desc == each.desc and _shared(box, bins) >= CROWD_COVERS * _area(box) for desc, bins in crowds)


def count_duplicates(objects: Sequence[PredictedObject]) -> int:
    """Predictions that repeat an earlier one: the same description, and ``SAME_BOX``."""
    boxes = np.array([box_around(each.bins) for each in objects], dtype=np.int64).reshape(-1, 4)
    descs = np.array([each.desc for each in objects])
    repeats = (box_ious(boxes, boxes) >= SAME_BOX) & (descs[:, None] == descs[None, :])
    return int(np.tril(repeats, -1).any(axis=1).sum())


def _pixels(bins: Sequence[int], size: tuple[int, int]) -> Box:
    left, top, right, bottom = to_pixels(bins, size)
    return left, top, right, bottom


def _area(box: Sequence[float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _shared(one: Sequence[float], other: Sequence[float]) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0, width) * max(0, height)
