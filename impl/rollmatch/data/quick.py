"""A quick check of detection records, for files of many lines: what passes breaks no rule of ``check_record``.

What does not pass may still be right; then the full check decides. Image files are not looked at here.
"""

import json
from functools import lru_cache
from typing import NoReturn

import msgspec

from rollmatch.data.desc import check_desc
from rollmatch.records import NUM_BINS

_NAMES = (b'"images"', b'"objects"', b'"width"', b'"height"')
_BOX = frozenset(("desc", "bbox_2d"))
_INT = {int}


class QuickRecord(msgspec.Struct, forbid_unknown_fields=True):
    """A record with boxes in bins."""

    images: list[str]
    objects: list[dict[str, object]]
    width: object
    height: object
    metadata: msgspec.Raw = msgspec.Raw(b"{}")


_DECODE = msgspec.json.Decoder(QuickRecord).decode


def quick_record(line: bytes) -> QuickRecord | None:
    """The record, if it has boxes in bins and is plainly right; None: look closer.

    A name that stands twice in one JSON object is found by counting names, as decoding keeps only the last.

    >>> line = b'{"images": ["a"], "width": 8, "height": 6, "objects": [{"desc": "x", "bbox_2d": [1, 2, 3, 4]}]}'
    >>> quick_record(line).images, quick_record(line.replace(b'"width": 8', b'"width": 8, "width": 8')) is None
    (['a'], True)
    """
    try:
        record = _DECODE(line)
        aside = bytes(record.metadata)
        if aside != b"{}" and type(parse_json(aside)) is not dict:
            return None
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if any(line.count(name) - aside.count(name) != 1 for name in _NAMES) or line.count(b'"metadata"') > 1:
        return None
    if not (_is_side(record.width) and _is_side(record.height)) or not record.images or not all(record.images):
        return None
    wanted = len(record.objects)
    if any(line.count(name) - aside.count(name) != wanted for name in (b'"desc"', b'"bbox_2d"')):
        return None
    return record if all(map(_is_plain_box, record.objects)) else None


def parse_json(text: str | bytes) -> object:
    """One JSON value. Errors: ``ValueError``, also for a name that stands twice in one object, NaN and Infinity."""
    try:
        value: object = json.loads(text, object_pairs_hook=_without_twins, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("lists and objects are nested too deeply") from error
    return value


def _is_side(value: object) -> bool:
    return type(value) is int and value > 0


def _is_plain_box(item: dict[str, object]) -> bool:
    if item.keys() != _BOX:
        return False
    box, desc = item["bbox_2d"], item["desc"]
    if type(box) is not list or len(box) != 4 or set(map(type, box)) != _INT or type(desc) is not str:
        return False
    left, top, right, bottom = box
    return 0 <= left < right < NUM_BINS and 0 <= top < bottom < NUM_BINS and _is_good_desc(desc)


@lru_cache(maxsize=65536)
def _is_good_desc(desc: str) -> bool:
    return next(check_desc(desc, key="", place=""), None) is None


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice in one object")
    return dict(pairs)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
