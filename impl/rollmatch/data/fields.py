"""Checks of the fields that every kind of record may have."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollmatch.data.image import check_image
from rollmatch.data.place import Place, image_path, is_side, wrong_type
from rollmatch.errors import DataError


def check_names(names: Iterable[str], known: Sequence[str], key: str, *, place: str = "") -> Iterator[DataError]:
    """No name is unknown; ``place`` says where they stand within the record."""
    for name in names:
        if name not in known:
            near = "".join(f"Rename it to {one}; or r" for one in known if one == f"{name}s") or "R"
            remedy = f"{near}emove it, or put it below metadata; known are {', '.join(known)}."
            yield DataError(f"{place}{name!r} is not a known field", code="field-unknown", key=key, remedy=remedy)


def check_sides(record: Mapping[str, object], key: str) -> Iterator[DataError]:
    """Width and height."""
    for name in ("width", "height"):
        if name in record and not is_side(record[name]):
            yield wrong_type(name, "a whole number above 0", record[name], key)


def check_images(record: Mapping[str, Any], place: Place, *, at_least_one: bool) -> Iterator[DataError]:
    """Paths, and the files behind them; whether a record must have them is checked elsewhere."""
    images = record.get("images", ())
    if "images" in record and not (_is_paths(images) and (images or not at_least_one)):
        wanted = "a list of one or more paths" if at_least_one else "a list of paths"
        yield wrong_type("images", wanted, images, place.key)
        return
    sides: tuple[Any, Any] = (record.get("width"), record.get("height"))
    size = sides if all(map(is_side, sides)) else None
    for image in images:
        yield from check_image(image_path(image, place.image_root), size=size, key=place.key)


def check_metadata(record: Mapping[str, object], key: str) -> Iterator[DataError]:
    """Whatever the user likes, by names."""
    if not isinstance(record.get("metadata", {}), dict):
        yield wrong_type("metadata", "a mapping", record["metadata"], key)


def check_prompting(record: Mapping[str, object], key: str) -> Iterator[DataError]:
    """A system message and tools, as the chat template takes them."""
    if not isinstance(record.get("system", ""), str):
        yield wrong_type("system", "a text", record["system"], key)
    tools = record.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        yield wrong_type("tools", "a list of mappings (JSON schemas of functions)", tools, key)


def _is_paths(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(image, str) and image for image in value)
