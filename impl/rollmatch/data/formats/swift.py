"""ms-swift's grounding JSONL: ``{"messages", "images", "objects": {"ref", "bbox", "bbox_type"}}``.

``bbox_type`` is ``real`` (pixels of the original, the default) or ``norm1`` (0..1). Refs and boxes are two lists; they
describe an object each where they are equally long. Source: ms-swift 4.6.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from rollmatch.data.formats import BadLabel, LabeledImage, LabeledObject, OnBad, are_numbers, raise_bad


def read_swift(path: Path, images: Path, *, bad: OnBad = raise_bad) -> Iterator[LabeledImage]:
    """One image per line; lines of several images are rejected. Errors: ``BadLabel``, naming the line."""
    with path.open(encoding="utf-8") as file:
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


def _labeled(line: str, images: Path, where: str) -> LabeledImage:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadLabel(f"{where} is not JSON: {error}", key=where, remedy="Write one JSON object a line.") from error
    named = record.get("images") if isinstance(record, dict) else None
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise BadLabel(f"{where} has images {named!r}", key=where, remedy="Give one image path a line.")
    path = images / named[0]
    try:
        with Image.open(path) as opened:
            width, height = ImageOps.exif_transpose(opened).size
    except OSError as error:
        raise BadLabel(f"{where}: {path}: {error}", key=where, remedy="Correct the path, or give --images.") from error
    return LabeledImage(path=str(path), width=width, height=height, objects=_objects(record, (width, height), where))


def _objects(record: dict[str, Any], size: tuple[int, int], where: str) -> tuple[LabeledObject, ...]:
    described = record.get("objects") or {}
    if not isinstance(described, dict):
        raise BadLabel(f"{where} has objects {described!r}", key=where, remedy="Write ref and bbox.")
    refs, boxes = described.get("ref", []), described.get("bbox", [])
    if not isinstance(refs, list) or not isinstance(boxes, list):
        raise BadLabel(f"{where} has ref {refs!r} and bbox {boxes!r}", key=where, remedy="Write two lists.")
    if len(refs) != len(boxes):
        problem = f"{where} has {len(refs)} refs for {len(boxes)} boxes"
        raise BadLabel(problem, key=where, remedy="Write one ref for each box.")
    scale = {"real": (1, 1), "norm1": size}.get(str(described.get("bbox_type", "real")))
    if scale is None:
        problem = f"{where} has bbox_type {described['bbox_type']!r}"
        raise BadLabel(problem, key=where, remedy="Use real (pixels) or norm1 (0..1).")
    made = []
    for ref, box in zip(refs, boxes):
        if not isinstance(box, list) or len(box) != 4 or not are_numbers(box):
            raise BadLabel(f"{where} has the box {box!r}", key=where, remedy="Write [x1, y1, x2, y2].")
        left, top, right, bottom = (value * scale[place % 2] for place, value in enumerate(box))
        made.append(LabeledObject(desc=str(ref), box=(left, top, right, bottom)))
    return tuple(made)
