"""Our JSONL, as a target and as a source of conversions.

Boxes are clipped to the image and rounded to bins 0..999. Crowd regions go to ``metadata.crowd``, where no objective
matches or appends them; areas of masks go to ``metadata.areas``, in the order of the objects. Images that their EXIF
data turns are stored upright, because training reads stored pixels.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from rollmatch.data.desc import check_desc
from rollmatch.data.formats import BadLabel, LabeledImage, LabeledObject, OnBad, Summary, are_numbers, raise_bad
from rollmatch.data.geometry import BOX_LEN, bins_of, twice_area
from rollmatch.data.image import UPRIGHT, check_regular, orientation_of, rgb_of, why_unreadable
from rollmatch.data.quick import parse_json
from rollmatch.records import NUM_BINS


class NativeWriter:
    """Writes records to ``path``. ``polygons``: outlines instead of boxes, where an object has one.

    ``relative``: paths of images start at the directory of ``path``.
    """

    def __init__(self, path: Path, *, polygons: bool, relative: bool = False, bad: OnBad = raise_bad) -> None:
        self.path, self.polygons, self.relative, self.bad = path, polygons, relative, bad
        self.upright = path.with_name(f"{path.stem}-upright")
        self.summary = Summary()

    def write(self, images: Iterable[LabeledImage]) -> Summary:
        """All records, streamed; returns what was written and dropped. Errors: ``BadLabel``."""
        with self.path.open("w", encoding="utf-8") as file:
            for image in images:
                record = self._record(image)
                if record is not None:
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
        return self.summary

    def _record(self, image: LabeledImage) -> dict[str, object] | None:
        size = image.width, image.height
        try:
            path = self._upright(Path(image.path), size)
        except BadLabel as error:
            self.summary.dropped["image of another size than its labels say"] += 1
            self.bad(error)
            return None
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            self.summary.dropped["image that cannot be opened"] += 1
            problem = f"cannot be opened: {why_unreadable(error)}"
            self.bad(BadLabel(problem, key=image.path, remedy="Correct the path, or give --images."))
            return None
        made = [(one, item) for one in image.objects if (item := self._item(one, size, image.path)) is not None]
        objects = [item for one, item in made if not one.is_crowd]
        areas = [one.area for one, _ in made if not one.is_crowd]
        crowds = [item for one, item in made if one.is_crowd]
        kept = {"crowd": crowds, "areas": [] if None in areas else areas}
        self.summary.images += 1
        self.summary.dropped.update(image.dropped)
        self.summary.objects += len(objects)
        self.summary.crowds += len(crowds)
        named = os.path.relpath(path, self.path.parent.resolve()) if self.relative else str(path)
        record = {"images": [named], "width": size[0], "height": size[1], "objects": objects}
        metadata = {name: values for name, values in kept.items() if values}
        return record | ({"metadata": metadata} if metadata else {})

    def _item(self, one: LabeledObject, size: tuple[int, int], origin: str) -> dict[str, object] | None:
        """``desc`` and a shape in bins; None for what has no area there."""
        for error in check_desc(one.desc, key=origin, place="an object"):
            self.summary.dropped["description that cannot be used"] += 1
            self.bad(BadLabel(error.problem, key=origin, remedy=error.remedy))
            return None
        outline = to_bins(one.polygon, size) if self.polygons and not one.is_crowd else ()
        if outline and twice_area(outline):
            self.summary.without_box[one.desc] = False
            return {"desc": one.desc, "poly": list(outline)}
        box = to_bins(one.box, size)
        if is_cut(one.box, size):
            self.summary.dropped[CUT] += 1
        if (reason := why_without_area(one.box, size)) is not None:
            self.summary.dropped[reason] += 1
            self.summary.without_box.setdefault(one.desc, True)
            return None
        self.summary.without_box[one.desc] = False
        return {"desc": one.desc, "bbox_2d": list(box)}

    def _upright(self, path: Path, size: tuple[int, int]) -> Path:
        """The image's own path, or that of an upright copy. Errors: ``BadLabel`` where the labels mean another size."""
        check_regular(path)
        with Image.open(path) as image:
            turned = orientation_of(image) != UPRIGHT
            upright = ImageOps.exif_transpose(image) if turned else image
            if upright.size != size:
                problem = f"{path} is {upright.size[0]} x {upright.size[1]} pixels upright, its labels say {size}"
                raise BadLabel(problem, key=str(path), remedy="Label the upright image.")
            if not turned:
                return path.resolve()
            self.upright.mkdir(exist_ok=True)
            copy = self.upright / f"{self.summary.upright:06d}-{path.stem}.png"
            rgb_of(upright).save(copy)
            self.summary.upright += 1
            return copy.resolve()


def read_native(path: Path, images: Path, *, bad: OnBad = raise_bad) -> Iterator[LabeledImage]:
    """Records of our JSONL with their crowd regions, in pixels. Errors: ``BadLabel``, naming the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record: Any = parse_json(line.decode("utf-8"))
                size = record["width"], record["height"]
                crowds = record.get("metadata", {}).get("crowd", [])
                if not are_numbers(list(size)) or min(size) < 1:
                    raise ValueError(f"{size} is no size")
                objects = [labeled(item, size) for item in record["objects"]]
                objects += [labeled(item, size, is_crowd=True) for item in crowds]
                found = str(images / record["images"][0])
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                bad(
                    BadLabel(f"{path}:{number}: {error!r}", key=f"{path}:{number}", remedy="Run rollmatch check on it.")
                )
                continue
            yield LabeledImage(path=found, width=size[0], height=size[1], objects=tuple(objects))


def labeled(item: Mapping[str, Any], size: tuple[int, int], *, is_crowd: bool = False) -> LabeledObject:
    """An object of a record, in pixels of an image of ``size`` (width, height).

    >>> labeled({"desc": "cat", "bbox_2d": [0, 0, 999, 999]}, (101, 200)).box
    (0.0, 0.0, 100.0, 199.0)
    """
    polygon = _pixels(item["poly"], size) if "poly" in item else ()
    corners = polygon or _pixels(item["bbox_2d"], size)
    xs, ys = corners[0::2], corners[1::2]
    box = (min(xs), min(ys), max(xs), max(ys))
    if not isinstance(item["desc"], str):
        raise TypeError(f"the desc {item['desc']!r} is no text")
    return LabeledObject(desc=item["desc"], box=box, polygon=polygon, is_crowd=is_crowd)


def _pixels(values: Sequence[object], size: tuple[int, int]) -> tuple[float, ...]:
    bins = bins_of(values)
    if len(bins) != len(values) or len(bins) < BOX_LEN:
        raise ValueError(f"{values!r} are no coordinates")
    return to_pixels(bins, size)


def to_bins(values: Sequence[float], size: tuple[int, int]) -> tuple[int, ...]:
    """[x, y, ...] pixels, clipped to an image of ``size`` (width, height), as bins 0..999.

    >>> to_bins((-5, 0, 50, 199), (101, 200))
    (0, 0, 500, 999)
    """
    scales = [(NUM_BINS - 1) / max(1, side - 1) for side in size]
    last = [side - 1 for side in size]
    clipped = (min(max(value, 0), last[place % 2]) for place, value in enumerate(values))
    return tuple(round(value * scales[place % 2]) for place, value in enumerate(clipped))


CUT = "part of an object outside the image"
"""What ``to_bins`` leaves out of a box that ``is_cut``."""


def is_cut(box: Sequence[float], size: tuple[int, int]) -> bool:
    """Whether a box [x1, y1, x2, y2] in pixels has an area inside the image and reaches over its edge by a pixel.

    >>> [is_cut(box, (100, 100)) for box in ((0, 0, 100.5, 100), (0, 0, 101, 100), (200, 0, 300, 9))]
    [False, True, False]
    """
    reach = max(-box[0], -box[1], box[2] - size[0], box[3] - size[1])
    return reach >= 1 and why_without_area(box, size) is None


def why_without_area(box: Sequence[float], size: tuple[int, int]) -> str | None:
    """Why a box [x1, y1, x2, y2] in pixels has no area in bins; None where it has one.

    >>> why_without_area((5, 5, 5, 9), (100, 100)), why_without_area((-9, 5, 0, 9), (100, 100))
    ('object without area inside the image', 'object outside the image')
    """
    left, top, right, bottom = to_bins(box, size)
    if right > left and bottom > top:
        return None
    outside = box[0] >= size[0] or box[1] >= size[1] or box[2] <= 0 or box[3] <= 0
    return f"object {'outside' if outside else 'without area inside'} the image"


def to_pixels(bins: Sequence[int], size: tuple[int, int]) -> tuple[float, ...]:
    """[x, y, ...] bins as pixels of an image of ``size``: the inverse of ``to_bins``, but for rounding.

    >>> to_pixels((0, 999), (101, 200))
    (0.0, 199.0)
    """
    pairs = zip(bins, chain.from_iterable([size] * (len(bins) // 2)))
    return tuple(value / (NUM_BINS - 1) * (side - 1) for value, side in pairs)
