"""YOLO data sets: ``data.yaml``, images in ``.../images/...``, one ``.txt`` per image in ``.../labels/...``.

A line is ``class cx cy w h`` or ``class x1 y1 x2 y2 ...`` (an outline, also of an oriented box), all in 0..1 of the
upright image; no file, or an empty one, means no objects. Where ``data.yaml`` has ``kpt_shape`` ([K, 2] or [K, 3]), K
keypoints follow each box, and are left out. Source: Ultralytics' formats.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import yaml

from rollmatch.data.formats import BadLabel, LabeledImage, LabeledObject, OnBad, are_numbers, raise_bad
from rollmatch.data.image import ImageUnreadable, check_regular, upright_size, why_unreadable

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
LEAST, MOST = -0.01, 1.01
"""Coordinates that Ultralytics takes for ones in 0..1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Labels:
    """How lines of label files are read."""

    names: dict[int, str]
    num_keypoint_values: int
    """Numbers behind each box; 0: there are no keypoints."""


def read_yolo(path: Path, split: str, *, bad: OnBad = raise_bad) -> Iterator[LabeledImage]:
    """Images of one split of ``data.yaml``, in the order of their paths. Errors: ``BadLabel``, naming file and line."""
    try:
        described = yaml.load(path.read_text(encoding="utf-8"), Loader=_WithoutTwins)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise BadLabel(f"{path}: {error}", key=str(path), remedy="Give the data.yaml of a YOLO data set.") from error
    if not isinstance(described, dict) or "names" not in described or split not in described:
        problem = f"{path} has no names, or no {split}"
        raise BadLabel(problem, key=str(path), remedy="Give the data.yaml of a YOLO data set, and one of its splits.")
    labels = _Labels(
        names=_names_of(described["names"], path),
        num_keypoint_values=_keypoint_values(described.get("kpt_shape"), path),
    )
    root = path.parent / described.get("path", ".")
    for image in _images(root, described[split]):
        try:
            width, height = upright_size(image)
        except ImageUnreadable as error:
            bad(BadLabel(error.problem, key=str(path), remedy="Correct the list of images."))
            continue
        objects = tuple(_read_labels(_labels_of(image), labels, (width, height), bad))
        yield LabeledImage(path=str(image), width=width, height=height, objects=objects)


def write_yolo(images: Iterable[LabeledImage], directory: Path) -> None:
    """``data.yaml``, ``images/`` (links to the images) and ``labels/``.

    Boxes are cut at the image's edges; crowd regions, and boxes without area inside the image, are left out.
    """
    for name in ("images", "labels"):
        (directory / name).mkdir(parents=True)
    numbers: dict[str, int] = {}
    for place, image in enumerate(images):
        path = Path(image.path).resolve()
        name = f"{place:06d}-{path.stem}"
        (directory / "images" / f"{name}{path.suffix}").symlink_to(path)
        lines = []
        for one in image.objects:
            label = _relative(one.box, image)
            if not one.is_crowd and min(label[2:]) > 0:
                number = numbers.setdefault(one.desc, len(numbers))
                lines.append(" ".join([str(number), *(f"{value:.6f}" for value in label)]))
        (directory / "labels" / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    described = {"path": ".", "train": "images", "names": {number: name for name, number in numbers.items()}}
    (directory / "data.yaml").write_text(
        yaml.safe_dump(described, sort_keys=False, allow_unicode=True), encoding="utf-8"
    )


def _relative(box: tuple[float, float, float, float], image: LabeledImage) -> tuple[float, float, float, float]:
    """Pixel edges -> centre and size in 0..1, of the part inside the image; a size of 0 or less: nothing is inside.

    >>> _relative((10, 20, 30, 60), LabeledImage(path="", width=100, height=200, objects=()))
    (0.2, 0.2, 0.2, 0.2)
    """
    width, height = image.width, image.height
    left, top = max(box[0], 0.0), max(box[1], 0.0)
    right, bottom = min(box[2], width), min(box[3], height)
    return (left + right) / 2 / width, (top + bottom) / 2 / height, (right - left) / width, (bottom - top) / height


def _names_of(listed: object, path: Path) -> dict[int, str]:
    """Class number -> name, of a list or a mapping."""
    pairs = dict(enumerate(listed)) if isinstance(listed, list) else listed
    if not isinstance(pairs, dict) or not all(isinstance(k, int) and isinstance(v, str) for k, v in pairs.items()):
        raise BadLabel(f"{path} has names that are no texts", key=str(path), remedy="Write a list of names.")
    if twins := [name for name in pairs.values() if list(pairs.values()).count(name) > 1]:
        remedy = "Merge the classes, or name them differently."
        raise BadLabel(f"{path} names two classes {twins[0]!r}", key=str(path), remedy=remedy)
    return pairs


def _keypoint_values(shape: object, path: Path) -> int:
    """Numbers behind each box, of ``kpt_shape``; 0 where there is none."""
    if shape is None:
        return 0
    if not isinstance(shape, list) or not are_numbers(shape) or len(shape) != 2 or shape[1] not in (2, 3):
        problem = f"{path} has kpt_shape {shape!r}"
        raise BadLabel(problem, key=str(path), remedy="Write [number of keypoints, 2] or [number of keypoints, 3].")
    return int(shape[0] * shape[1])


class _WithoutTwins(yaml.SafeLoader):
    """PyYAML's loader keeps the last of two entries with one key: here they are an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twins := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"{twins[0]!r} stands twice", node.start_mark)
        made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return made


def _images(root: Path, places: object) -> Iterator[Path]:
    """The image files that a split names: directories, with all below them, or lists of paths."""
    for place in places if isinstance(places, list) else [places]:
        if not isinstance(place, str):
            raise BadLabel(f"{place!r} is no path", key=str(root), remedy="Name directories or lists of paths.")
        found = root / place
        if found.suffix == ".txt":
            yield from (root / line.strip() for line in _lines(found) if line.strip())
        elif found.is_dir():
            below = (found / name for name in glob("**", root_dir=found, recursive=True))  # through links; none hidden
            yield from sorted(path for path in below if path.suffix.lower() in SUFFIXES)
        else:
            raise BadLabel(f"{found} is neither a directory nor a list", key=str(found), remedy="Correct data.yaml.")


def _labels_of(image: Path) -> Path:
    """``.../images/train/x.jpg`` -> ``.../labels/train/x.txt``: the last part named images is replaced.

    >>> str(_labels_of(Path("a/images/b/images/c.jpg")))
    'a/images/b/labels/c.txt'
    """
    parts = list(image.with_suffix(".txt").parts)
    places = [index for index, part in enumerate(parts) if part == "images"]
    if places:
        parts[places[-1]] = "labels"
    return Path(*parts)


def _read_labels(path: Path, labels: _Labels, size: tuple[int, int], bad: OnBad) -> Iterator[LabeledObject]:
    try:
        lines = _lines(path) if path.is_file() else []
    except BadLabel as error:
        bad(error)
        return
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                yield _labeled(line.split(), labels, size, f"{path}:{number}")
        except BadLabel as error:
            bad(error)


def _lines(path: Path) -> list[str]:
    """Errors: ``BadLabel``."""
    try:
        check_regular(path)
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{path} cannot be read: {why_unreadable(error)}"
        raise BadLabel(problem, key=str(path), remedy="Write a text file in UTF-8.") from error


def _labeled(words: list[str], labels: _Labels, size: tuple[int, int], where: str) -> LabeledObject:
    try:
        number, values = int(words[0]), [float(word) for word in words[1:]]
        desc = labels.names[number]
        if not are_numbers(values):
            raise ValueError(values)
    except (ValueError, KeyError) as error:
        problem = f"{where} holds {' '.join(words)!r}"
        raise BadLabel(problem, key=where, remedy="Write a class of data.yaml and numbers in 0..1.") from error
    if (wanted := labels.num_keypoint_values) and len(values) != 4 + wanted:
        problem = f"{where} has {len(values)} numbers"
        raise BadLabel(problem, key=where, remedy=f"Write a box and {wanted} numbers of keypoints, as kpt_shape says.")
    values = values[:4] if wanted else values
    if len(values) != 4 and (len(values) < 6 or len(values) % 2):
        remedy = "Write 4, or x and y of 3 points and more; keypoints need kpt_shape in data.yaml."
        raise BadLabel(f"{where} has {len(values)} numbers", key=where, remedy=remedy)
    if outside := [value for value in values if not LEAST <= value <= MOST]:
        raise BadLabel(
            f"{where} holds {outside[0]:g}, which is not in 0..1",
            key=where,
            remedy="Divide x by the image's width and y by its height.",
        )
    width, height = size
    if len(values) == 4:
        across, down, wide, high = values[0] * width, values[1] * height, values[2] * width, values[3] * height
        return LabeledObject(desc=desc, box=(across - wide / 2, down - high / 2, across + wide / 2, down + high / 2))
    xs, ys = [x * width for x in values[0::2]], [y * height for y in values[1::2]]
    polygon = tuple(value for point in zip(xs, ys) for value in point)
    return LabeledObject(desc=desc, box=(min(xs), min(ys), max(xs), max(ys)), polygon=polygon)
