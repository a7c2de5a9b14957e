"""ms-swift's grounding JSONL: ``{"messages", "images", "objects": {"ref", "bbox", "bbox_type"}}``.

``bbox_type`` is ``real`` (pixels of the original, the default) or ``norm1`` (0..1). Refs and boxes are two lists.
Equally long ones describe an object each; a single ref describes all boxes; else a box has the ref whose
``<ref-object>`` comes last before its ``<bbox>`` in the messages. Boxes without a ref, and points, are left out and
counted. Source: ms-swift 4.6.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rollmatch.data.formats import BadLabel, LabeledImage, LabeledObject, OnBad, are_numbers, raise_bad
from rollmatch.data.image import ImageUnreadable, upright_size
from rollmatch.data.quick import parse_json

_TAG = re.compile("<ref-object>|<bbox>")


def read_swift(path: Path, images: Path, *, bad: OnBad = raise_bad) -> Iterator[LabeledImage]:
    """One image per line; lines of several images are rejected. Errors: ``BadLabel``, naming the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                labeled = _labeled(line, images, f"{path}:{number}")
            except BadLabel as error:
                bad(error)
                continue
            yield labeled


def write_swift(images: Iterable[LabeledImage], path: Path, *, prompt: str) -> None:
    """One line per image: ``prompt`` as the question, all objects as the answer; crowd regions are left out."""
    with path.open("w", encoding="utf-8") as file:
        for image in images:
            objects = [one for one in image.objects if not one.is_crowd]
            answer = "\n".join("<ref-object><bbox>" for _ in objects)
            record = {
                "messages": [
                    {"role": "user", "content": f"<image>{prompt}"},
                    {"role": "assistant", "content": answer},
                ],
                "images": [image.path],
                "objects": {
                    "ref": [one.desc for one in objects],
                    "bbox": [[round(value, 3) for value in one.box] for one in objects],
                    "bbox_type": "real",
                },
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _labeled(line: bytes, images: Path, where: str) -> LabeledImage:
    try:
        record: Any = parse_json(line.decode("utf-8"))
    except ValueError as error:
        raise BadLabel(f"{where} is not JSON: {error}", key=where, remedy="Write one JSON object a line.") from error
    named = record.get("images") if isinstance(record, dict) else None
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise BadLabel(f"{where} has images {named!r}", key=where, remedy="Give one image path a line.")
    path = images / named[0]
    try:
        width, height = upright_size(path)
    except ImageUnreadable as error:
        raise BadLabel(error.problem, key=where, remedy="Correct the path, or give --images.") from error
    objects, dropped = _objects(record, (width, height), where)
    return LabeledImage(path=str(path), width=width, height=height, objects=objects, dropped=dropped)


def _objects(
    record: dict[str, Any], size: tuple[int, int], where: str
) -> tuple[tuple[LabeledObject, ...], tuple[str, ...]]:
    """The objects, and why other boxes are none."""
    described = record.get("objects") or {}
    if not isinstance(described, dict):
        raise BadLabel(f"{where} has objects {described!r}", key=where, remedy="Write ref and bbox.")
    refs, boxes = described.get("ref") or [], described.get("bbox") or []
    if not isinstance(refs, list) or not isinstance(boxes, list) or not all(isinstance(ref, str) for ref in refs):
        raise BadLabel(f"{where} has ref {refs!r} and bbox {boxes!r}", key=where, remedy="Write two lists.")
    scale = {"real": (1, 1), "norm1": size}.get(str(described.get("bbox_type") or "real"))
    if scale is None:
        problem = f"{where} has bbox_type {described['bbox_type']!r}"
        raise BadLabel(problem, key=where, remedy="Use real (pixels) or norm1 (0..1).")
    made, dropped = [], []
    for desc, box in zip(_descs(record, refs, len(boxes), where), boxes, strict=True):
        if not isinstance(box, list) or len(box) not in (2, 4) or not are_numbers(box):
            raise BadLabel(f"{where} has the box {box!r}", key=where, remedy="Write [x1, y1, x2, y2].")
        if len(box) == 2 or desc is None:
            dropped.append("point in place of a box" if len(box) == 2 else "box without a ref")
            continue
        left, top, right, bottom = (value * scale[place % 2] for place, value in enumerate(box))
        made.append(LabeledObject(desc=desc, box=(left, top, right, bottom)))
    return tuple(made), tuple(dropped)


def _descs(record: dict[str, Any], refs: list[str], num_boxes: int, where: str) -> list[str | None]:
    """[num_boxes] the ref of each box, or None where there is none at all. Errors: ``BadLabel``."""
    if len(refs) == num_boxes:
        return list(refs)
    if len(refs) <= 1 and num_boxes:
        return [refs[0] if refs else None] * num_boxes
    messages = record.get("messages") or []
    text = "".join(str(one.get("content")) for one in messages if isinstance(one, dict))
    found, left = list[str | None](), iter(refs)
    ref: str | None = None
    for tag in _TAG.findall(text):
        if tag == "<bbox>":
            found.append(ref)
        else:
            ref = next(left, None)
    if len(found) != num_boxes or None in found or next(left, None) is not None:
        problem = f"{where} has {len(refs)} refs for {num_boxes} boxes, and its messages do not say which is whose"
        raise BadLabel(problem, key=where, remedy="Write one ref for each box, or <ref-object> before its <bbox> tags.")
    return found
