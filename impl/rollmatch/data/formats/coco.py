"""COCO and LVIS annotation files: streamed; of images only name and size are kept, of annotations boxes and outlines.

``bbox`` is [x, y, width, height] in pixel edges; category ids need not be contiguous. Source: the COCO data format and
LVIS v1 (an image without ``file_name`` is named by the end of its ``coco_url``).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ijson

from rollmatch.data.formats import BadLabel, LabeledImage, LabeledObject, OnBad, are_numbers, raise_bad

MOST_DIGITS = 1000
_ZEROS = bytes.maketrans(b"123456789", b"000000000")


class Category(NamedTuple):
    """A category as an instances file numbers and names it."""

    number: int
    name: str


def read_coco(path: Path, images: Path, *, bad: OnBad = raise_bad) -> Iterator[LabeledImage]:
    """Images in the order of the file; ``images`` is their directory. Errors: ``BadLabel``, naming entry and field."""
    names = {category.number: desc for desc, category in read_categories(path).items()}
    listed, unusable = _read_images(path, bad)
    by_image: dict[int, list[LabeledObject]] = {number: [] for number in listed}
    unlisted = set[int]()
    for entry in _entries(path, "annotations", bad):
        try:
            number, labeled = _number(entry, "image_id", path), _labeled(entry, names, path)
        except BadLabel as error:
            bad(error)
            continue
        if number in by_image:
            by_image[number].append(labeled)
        elif number not in unusable:
            unlisted.add(number)
    for number, (file_name, width, height) in listed.items():
        objects = tuple(by_image.pop(number))
        yield LabeledImage(path=str(images / file_name), width=width, height=height, objects=objects)
    if unlisted:
        problem = f"{path}: {len(unlisted)} images of annotations are not listed, the first has id {min(unlisted)}"
        bad(BadLabel(problem, key=str(path), remedy="Add them to images, or remove their annotations."))


def read_categories(path: Path) -> dict[str, Category]:
    """Description -> category. Errors: ``BadLabel``, also where two ids or two descriptions are the same."""
    found: dict[str, Category] = {}
    names: dict[int, str] = {}
    for entry in _entries(path, "categories", raise_bad):
        number, name = _number(entry, "id", path), entry.get("name")
        if not isinstance(name, str) or not name:
            raise BadLabel(f"{_named(entry, path)} has name {name!r}", key=str(path), remedy="Name the category.")
        if number in names:
            problem = f"{path}: two categories have id {number}: {names[number]!r} and {name!r}"
            raise BadLabel(problem, key=str(path), remedy="Number categories, each with an id of its own.")
        desc = name.replace("_", " ")
        if desc in found:
            problem = f"{_named(entry, path)} has name {name!r}, and another category is {desc!r}, too"
            raise BadLabel(problem, key=str(path), remedy="Merge the categories, or name them differently.")
        names[number], found[desc] = desc, Category(number, name)
    if not found:
        raise BadLabel(f"{path} lists no categories", key=str(path), remedy="Give a COCO or LVIS instances file.")
    return found


def _read_images(path: Path, bad: OnBad) -> tuple[dict[int, tuple[str, int, int]], set[int]]:
    """Image id -> file name, width and height; and ids of images that cannot be used."""
    listed: dict[int, tuple[str, int, int]] = {}
    unusable = set[int]()
    for entry in _entries(path, "images", bad):
        try:
            number = _number(entry, "id", path)
            if number in listed or number in unusable:
                unusable.add(number)  # annotations do not say which of the two they are of
                problem = f"{path}: two images have id {number}"
                raise BadLabel(problem, key=str(path), remedy="Number images, each with an id of its own.")
            unusable.add(number)
            sides = _number(entry, "width", path), _number(entry, "height", path)
            listed[number] = (_file_name(entry, path), *sides)
            unusable.remove(number)
        except BadLabel as error:
            bad(error)
    return {number: about for number, about in listed.items() if number not in unusable}, unusable


def write_coco(images: Iterable[LabeledImage], path: Path, categories: Mapping[str, Category] | None = None) -> None:
    """A COCO instances file.

    ``categories``: description -> category, all of which are listed; None numbers them from 1 in the order of their
    names. Errors: ``BadLabel`` for an object of none of them.
    """
    described, annotations, names = [], [], set()
    for number, image in enumerate(images, start=1):
        entry = {"id": number, "file_name": image.path, "width": image.width, "height": image.height}
        described.append(entry)
        for one in image.objects:
            names.add(one.desc)
            annotations.append((number, one))
    if categories is None:
        categories = {name: Category(number, name) for number, name in enumerate(sorted(names), start=1)}
    if missing := sorted(names - categories.keys()):
        remedy = "Name a file that lists every category, or leave --categories out."
        raise BadLabel(f"no category is {missing[0]!r}", key="--categories", remedy=remedy)
    document = {
        "images": described,
        "annotations": [
            _as_coco(one, number, image, categories[one.desc].number)
            for number, (image, one) in enumerate(annotations, start=1)
        ],
        "categories": [{"id": number, "name": name} for number, name in categories.values()],
    }
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")


def _as_coco(one: LabeledObject, number: int, image: int, category: int) -> dict[str, object]:
    left, top, right, bottom = one.box
    width, height = right - left, bottom - top
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "bbox": [round(value, 3) for value in (left, top, width, height)],
        "area": round(width * height if one.area is None else one.area, 3),
        "iscrowd": int(one.is_crowd),
        "segmentation": [list(one.polygon)] if one.polygon else [],
    }


def _entries(path: Path, name: str, bad: OnBad) -> Iterator[dict[str, Any]]:
    """The objects of one of the file's lists, one after the other."""
    try:
        with path.open("rb") as file:
            for entry in ijson.items(_WithoutLongNumbers(file, path), f"{name}.item"):
                if isinstance(entry, dict):
                    yield entry
                else:
                    bad(BadLabel(f"{path}: {name} holds {entry!r}", key=str(path), remedy="Write objects."))
    except ijson.JSONError as error:
        problem = f"{path} is not JSON: {error}"
        raise BadLabel(problem, key=str(path), remedy="Download or export it again.") from error


class _WithoutLongNumbers:
    """A file that ijson can read: its parser in C ends the process at a number that Python's ``int`` refuses."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path, self.end = file, path, b""

    def read(self, size: int) -> bytes:
        """Errors: ``BadLabel``."""
        block = self.file.read(size)
        if b"0" * (MOST_DIGITS + 1) in (seen := (self.end + block).translate(_ZEROS)):
            problem = f"{self.path} has a number of more than {MOST_DIGITS} digits"
            raise BadLabel(problem, key=str(self.path), remedy="Download or export it again.")
        self.end = seen[-MOST_DIGITS:]
        return block


def _labeled(entry: dict[str, object], names: dict[int, str], path: Path) -> LabeledObject:
    box, outline, area = entry.get("bbox"), entry.get("segmentation"), entry.get("area")
    if not isinstance(box, list) or len(box) != 4 or not are_numbers(box):
        raise BadLabel(f"{_named(entry, path)} has bbox {box!r}", key=str(path), remedy="Write [x, y, width, height].")
    left, top, width, height = map(float, box)
    category = _number(entry, "category_id", path)
    if category not in names:
        problem = f"{_named(entry, path)} has category_id {category}, which is not listed"
        raise BadLabel(problem, key=str(path), remedy="Add the category, or remove the annotation.")
    is_crowd = entry.get("iscrowd", 0)
    if is_crowd not in (0, 1):
        raise BadLabel(f"{_named(entry, path)} has iscrowd {is_crowd!r}", key=str(path), remedy="Write 0 or 1.")
    single = isinstance(outline, list) and len(outline) == 1 and are_numbers(outline[0]) and len(outline[0]) >= 6
    return LabeledObject(
        desc=names[category],
        box=(left, top, left + width, top + height),
        polygon=tuple(map(float, outline[0])) if single and isinstance(outline, list) else (),
        is_crowd=bool(is_crowd),
        area=float(str(area)) if are_numbers([area]) else None,
    )


def _number(entry: dict[str, object], name: str, path: Path) -> int:
    value = entry.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadLabel(f"{_named(entry, path)} has {name} {value!r}", key=str(path), remedy="Write a whole number.")
    return value


def _file_name(entry: dict[str, object], path: Path) -> str:
    name = entry.get("file_name") or "/".join(str(entry.get("coco_url", "")).split("/")[-2:])
    if not name:
        raise BadLabel(f"{_named(entry, path)} has no file_name", key=str(path), remedy="Name its file.")
    return str(name)


def _named(entry: dict[str, object], path: Path) -> str:
    return f"{path}: the entry with id {entry.get('id')!r}"
