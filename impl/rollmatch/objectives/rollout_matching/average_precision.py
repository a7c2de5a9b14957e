"""COCO's average precision of boxes, by pycocotools.

Boxes are pixels of the stored image, read back from bins, so they differ from the annotations' by half a bin at most.
A polygon counts as the box around it. Ties of scores keep the order of the images, and of the objects in a response.
"""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

SUMMARY = (
    "AP",
    "AP50",
    "AP75",
    "AP_small",
    "AP_medium",
    "AP_large",
    "AR_1",
    "AR_10",
    "AR_100",
    "AR_small",
    "AR_medium",
    "AR_large",
)
"""Names of ``COCOeval.stats``, in its order."""
ALL_AREAS, MOST_DETECTIONS = 0, -1
IOU_50 = 0
DIGITS = 6

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueBox:
    """A true object of an image."""

    image: int
    desc: str
    box: Box
    """[x1, y1, x2, y2] pixels."""
    area: float
    """Pixels; decides between small, medium and large. COCO's is that of the mask."""
    is_crowd: bool = False
    """Detections in it are neither right nor wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedBox:
    """A predicted object of an image."""

    image: int
    desc: str
    box: Box
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragePrecision:
    """The figures of COCO; None where there is nothing to find."""

    summary: dict[str, float | None]
    """By the names of ``SUMMARY``."""
    by_desc: dict[str, dict[str, float | None]]
    """``AP``, ``AP50`` and ``AR_100`` of each category."""
    curve: tuple[float, ...] = ()
    """[101] precision at IoU 0.5 and recall 0, 0.01, ... 1, mean over categories; empty where there is nothing to
    find."""


def average_precision(truth: Sequence[TrueBox], detected: Sequence[DetectedBox], num_images: int) -> AveragePrecision:
    """AP and AR; ``image`` counts from 0. The true descriptions are the categories; others do not count here.

    >>> cat = TrueBox(image=0, desc="cat", box=(0, 0, 50, 50), area=2500)
    >>> found = DetectedBox(image=0, desc="cat", box=(0, 0, 50, 40), score=0.5)
    >>> round(average_precision([cat], [found], num_images=1).summary["AP"], 3)  # IoU 0.8: right at 0.5 to 0.8
    0.7
    """
    numbers = {desc: number for number, desc in enumerate(sorted({each.desc for each in truth}), start=1)}
    described = {
        "images": [{"id": image} for image in range(num_images)],
        "categories": [{"id": number, "name": desc} for desc, number in numbers.items()],
    }
    known = [each for each in detected if each.desc in numbers]
    with contextlib.redirect_stdout(io.StringIO()):
        judge = COCOeval(
            _coco(described, [_entry(each, numbers) | {"area": each.area} for each in truth]),
            _coco(described, [_entry(each, numbers) | {"score": each.score} for each in known]),
            iouType="bbox",
        )
        if not numbers:
            return AveragePrecision(summary=dict.fromkeys(SUMMARY), by_desc={})
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    precision, recall = judge.eval["precision"], judge.eval["recall"]
    by_desc = {}
    for place, desc in enumerate(numbers):
        curve = precision[:, :, place, ALL_AREAS, MOST_DETECTIONS]
        of_50, reached = curve[IOU_50], recall[:, place, ALL_AREAS, MOST_DETECTIONS]
        by_desc[desc] = {"AP": _mean(curve), "AP50": _mean(of_50), "AR_100": _mean(reached)}
    of_50 = precision[IOU_50, :, :, ALL_AREAS, MOST_DETECTIONS]
    return AveragePrecision(
        summary={n: _known(v) for n, v in zip(SUMMARY, judge.stats)},
        by_desc=by_desc,
        curve=tuple(_mean(at_recall) or 0.0 for at_recall in of_50),
    )


def _entry(each: TrueBox | DetectedBox, numbers: dict[str, int]) -> dict[str, Any]:
    left, top, right, bottom = each.box
    width, height = right - left, bottom - top
    is_crowd = isinstance(each, TrueBox) and each.is_crowd
    return {
        "image_id": each.image,
        "category_id": numbers[each.desc],
        "bbox": [left, top, width, height],
        "area": width * height,
        "iscrowd": int(is_crowd),
    }


def _coco(described: dict[str, Any], entries: list[dict[str, Any]]) -> Any:
    """An index over entries in memory; ids begin with 1, because COCOeval takes 0 for no match."""
    coco = COCO()
    coco.dataset = described | {"annotations": [{"id": number, **one} for number, one in enumerate(entries, start=1)]}
    coco.createIndex()
    return coco


def _mean(values: Any) -> float | None:
    """Mean of what is not -1, COCO's mark of nothing to find."""
    found = values[values > -1]
    return round(float(np.mean(found)), DIGITS) if found.size else None


def _known(value: float) -> float | None:
    return None if value == -1 else round(float(value), DIGITS)
