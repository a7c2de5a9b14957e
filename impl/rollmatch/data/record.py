"""One JSON object of a data set -> one sample, or everything that is wrong with it."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from rollmatch.data.chat import check_question, is_chat, messages_of
from rollmatch.data.desc import check_desc
from rollmatch.data.fields import check_images, check_metadata, check_names, check_prompting, check_sides
from rollmatch.data.geometry import bins_of, check_geometry, geometry_of
from rollmatch.data.place import Place, image_path, wrong_type
from rollmatch.errors import DataError
from rollmatch.records import GroundTruth, Sample

REQUIRED = ("images", "objects", "width", "height")
OPTIONAL = ("metadata", "messages", "prompt", "system", "tools")
WITH_IMAGES = ("images", "width", "height")
"""Required where the configured prompt asks about an image."""
QUESTIONS = ("question", "instruction", "problem", "query", "input", "text")
"""What others call it."""
OF_OBJECT = ("desc", "bbox_2d", "poly", "poly_points")


def check_record(record: object, place: Place) -> Iterator[DataError]:
    """Broken rules of one record."""
    if not isinstance(record, dict):
        problem, remedy = f"the line holds a {type(record).__name__}, not an object", "Write one JSON object per line."
        yield DataError(problem, code="field-type", key=place.key, remedy=remedy)
        return
    asks = is_chat(record)
    if not asks and not {"images", "objects"} & record.keys():
        yield _without_question(record, place.key)
        return
    if asks and "objects" not in record:
        problem = "there is a question, but no objects"
        remedy = "Add the true objects; if the answers are text, set rollout.answer_format to text."
        yield DataError(problem, code="field-missing", key=place.key, remedy=remedy)
        return
    for name in REQUIRED:
        if name not in record and not (asks and name in WITH_IMAGES):
            yield DataError(f"there is no {name}", code="field-missing", key=place.key, remedy="Add it.")
    yield from check_names(record, (*REQUIRED, *OPTIONAL), place.key)
    yield from check_sides(record, place.key)
    yield from check_images(record, place, at_least_one=not asks)
    yield from check_question(record, place.key) if asks else check_prompting(record, place.key)
    yield from _check_objects(record, place.key)
    yield from check_metadata(record, place.key)


def make_sample(record: Mapping[str, Any], place: Place) -> Sample:
    """A sample from a record that breaks no rule; objects in their given order."""
    return Sample(
        sample_id=place.sample_id,
        origin=place.key,
        images=tuple(image_path(image, place.image_root) for image in record.get("images", ())),
        objects=tuple(_ground_truth(item) for item in record["objects"]),
        width=record.get("width", 0),
        height=record.get("height", 0),
        messages=messages_of(record, place) if is_chat(record) else (),
        system=record.get("system"),
        tools=tuple(record.get("tools", ())),
        metadata=record.get("metadata", {}),
    )


def _without_question(record: Mapping[str, Any], key: str) -> DataError:
    """A text sample of another form, most likely."""
    problem = "there is no prompt and no messages, and nothing that the configured prompt asks about (images, objects)"
    likely = {name: get_close_matches(name, ("prompt", "messages"), cutoff=0.75) for name in record}
    column = next((name for name in QUESTIONS if name in record), "COLUMN")
    if any(likely.values()):
        remedy = " ".join(f"Rename {name} to {meant[0]}." for name, meant in likely.items() if meant)
    elif "conversations" in record:
        remedy = "Write conversations as messages, a list of {role: user or assistant, content: ...}."
    else:
        remedy = (
            f"Rename {column} to prompt, or read the file as it is: custom.dataset: {{source: json, train: FILE, "
            f"val: FILE, columns: {{prompt: {column}}}}}."
        )
    return DataError(problem, code="field-missing", key=key, remedy=remedy)


def _ground_truth(item: dict[str, Any]) -> GroundTruth:
    geometry = geometry_of(item)
    assert geometry is not None
    return GroundTruth(desc=item["desc"], geometry=geometry, bins=bins_of(item[geometry]))


def _check_objects(record: dict[str, object], key: str) -> Iterator[DataError]:
    objects = record.get("objects", [])
    if not isinstance(objects, list):
        yield wrong_type("objects", "a list", objects, key)
        return
    for index, item in enumerate(objects):
        name = f"objects[{index}]"
        if not isinstance(item, dict):
            yield wrong_type(name, "a mapping", item, key)
            continue
        yield from check_names(item, OF_OBJECT, key, place=f"{name}: ")
        yield from check_desc(item.get("desc"), key=key, place=name)
        yield from check_geometry(item, key=key, place=name)
