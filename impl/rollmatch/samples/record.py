"""One JSON object of a data set -> one sample, or everything that is wrong with it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rollmatch.errors import DataError
from rollmatch.records import GroundTruth, Sample
from rollmatch.samples.desc import check_desc
from rollmatch.samples.geometry import bins_of, check_geometry, geometry_of
from rollmatch.samples.image import check_image
from rollmatch.samples.place import FieldMissing, FieldType, FieldUnknown, Place, image_path, is_side, wrong_type

REQUIRED = ("images", "objects", "width", "height")
OPTIONAL = ("metadata",)
OF_OBJECT = ("desc", "bbox_2d", "poly", "poly_points")


def check_record(record: Any, place: Place) -> Iterator[DataError]:
    """Broken rules of one record."""
    if not isinstance(record, dict):
        problem = f"the line holds a {type(record).__name__}, not an object"
        yield FieldType(problem, key=place.key, remedy='Write {"images": [...], "objects": [...], ...}.')
        return
    yield from _check_names(record, place.key)
    yield from _check_sizes(record, place.key)
    yield from _check_images(record, place)
    yield from _check_objects(record, place.key)
    if not isinstance(record.get("metadata", {}), dict):
        yield wrong_type("metadata", "a mapping", record["metadata"], place.key)


def make_sample(record: Mapping[str, Any], place: Place) -> Sample:
    """A sample from a record that breaks no rule; objects in their given order."""
    return Sample(
        sample_id=place.sample_id,
        origin=place.key,
        images=tuple(image_path(image, place.image_root) for image in record["images"]),
        objects=tuple(_ground_truth(item) for item in record["objects"]),
        width=record["width"],
        height=record["height"],
        metadata=record.get("metadata", {}),
    )


def _ground_truth(item: dict[str, Any]) -> GroundTruth:
    geometry = geometry_of(item)
    assert geometry is not None
    return GroundTruth(desc=item["desc"], geometry=geometry, bins=bins_of(item[geometry]))


def _check_names(record: dict[str, Any], key: str) -> Iterator[DataError]:
    for name in REQUIRED:
        if name not in record:
            yield FieldMissing(f"there is no {name}", key=key, remedy="Add it.")
    yield from _check_unknown(record, (*REQUIRED, *OPTIONAL), key)


def _check_unknown(holder: Iterable[str], known: tuple[str, ...], key: str, place: str = "") -> Iterator[DataError]:
    for name in holder:
        if name not in known:
            remedy = f"Remove it, or put it below metadata; known are {', '.join(known)}."
            yield FieldUnknown(f"{place}{name!r} is not a known field", key=key, remedy=remedy)


def _check_sizes(record: dict[str, Any], key: str) -> Iterator[DataError]:
    for name in ("width", "height"):
        if name in record and not is_side(record[name]):
            yield wrong_type(name, "a whole number above 0", record[name], key)


def _check_images(record: dict[str, Any], place: Place) -> Iterator[DataError]:
    images = record.get("images")
    if not isinstance(images, list) or not images or not all(isinstance(image, str) and image for image in images):
        if "images" in record:
            yield wrong_type("images", "a list of one or more paths", images, place.key)
        return
    sides: tuple[Any, Any] = (record.get("width"), record.get("height"))
    size = sides if all(map(is_side, sides)) else None
    for image in images:
        yield from check_image(image_path(image, place.image_root), size=size, key=place.key)


def _check_objects(record: dict[str, Any], key: str) -> Iterator[DataError]:
    objects = record.get("objects", [])
    if not isinstance(objects, list):
        yield wrong_type("objects", "a list", objects, key)
        return
    for index, item in enumerate(objects):
        name = f"objects[{index}]"
        if not isinstance(item, dict):
            yield wrong_type(name, "a mapping", item, key)
            continue
        yield from _check_unknown(item, OF_OBJECT, key, f"{name}: ")
        yield from check_desc(item.get("desc"), key=key, place=name)
        yield from check_geometry(item, key=key, place=name)
