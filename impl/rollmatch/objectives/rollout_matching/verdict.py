"""One element of a response's list -> a predicted object, or the reason why it is none."""

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from rollmatch.model.vocabulary import coord_token
from rollmatch.objectives.rollout_matching.scan import JsonObject
from rollmatch.records import Geometry, PredictedObject

_COORD_LITERAL = re.compile(r"<\|coord_\d+\|>")


class DropReason(StrEnum):
    """Why something in a response is no prediction; of an element the first that applies, in this order."""

    NOT_AN_OBJECT = "not_an_object"
    DUPLICATE_KEY = "duplicate_key"
    UNEXPECTED_KEYS = "unexpected_keys"
    MISSING_DESC = "missing_desc"
    """Absent, no string, blank, or no text (half a surrogate pair)."""
    COORD_TOKEN_IN_DESC = "coord_token_in_desc"
    """The token, or its literal, which would become the token when written again."""
    MISSING_GEOMETRY = "missing_geometry"
    """Absent, or no list."""
    TWO_GEOMETRIES = "two_geometries"
    NESTED_GEOMETRY = "nested_geometry"
    WRONG_ARITY = "wrong_arity"
    """A box without exactly 4 values; a polygon with an odd number of them or fewer than 6."""
    NON_COORD_TOKEN = "non_coord_token"
    """A value that is not exactly one coordinate token between quotes."""
    BBOX_DEGENERATE = "bbox_degenerate"
    """x2 <= x1 or y2 <= y1."""
    POLY_DEGENERATE = "poly_degenerate"
    """Zero signed area."""
    MALFORMED = "malformed"
    TRAILING_TEXT = "trailing_text"


class Slot(NamedTuple):
    byte: int
    position: int
    coord_bin: int


def judge(value: Any, slots: tuple[Slot, ...]) -> PredictedObject | DropReason:
    if not isinstance(value, JsonObject):
        return DropReason.NOT_AN_OBJECT
    members = dict(value.pairs)
    if len(members) != len(value.pairs):
        return DropReason.DUPLICATE_KEY
    if not members.keys() <= {"desc", *Geometry}:
        return DropReason.UNEXPECTED_KEYS
    desc = members.get("desc")
    if not isinstance(desc, str) or not desc.strip() or any("\ud800" <= character <= "\udfff" for character in desc):
        return DropReason.MISSING_DESC
    if _COORD_LITERAL.search(desc):
        return DropReason.COORD_TOKEN_IN_DESC
    geometries = [geometry for geometry in Geometry if geometry in members]
    if len(geometries) == 2:
        return DropReason.TWO_GEOMETRIES
    values = members[geometries[0]] if geometries else None
    if not isinstance(values, list):
        return DropReason.MISSING_GEOMETRY
    reason = _flaw_of(geometries[0], values, slots)
    bins, positions = tuple(slot.coord_bin for slot in slots), tuple(slot.position for slot in slots)
    return reason or PredictedObject(desc=desc, geometry=geometries[0], bins=bins, positions=positions)


def _flaw_of(geometry: Geometry, values: list[Any], slots: tuple[Slot, ...]) -> DropReason | None:
    """No coordinate token stands outside the geometry once keys and desc are judged, so order decides the rest."""
    if any(isinstance(value, list) for value in values):
        return DropReason.NESTED_GEOMETRY
    if len(values) != 4 if geometry is Geometry.BBOX else len(values) < 6 or len(values) % 2:
        return DropReason.WRONG_ARITY
    bins = [slot.coord_bin for slot in slots]
    if values != [coord_token(coord_bin) for coord_bin in bins]:
        return DropReason.NON_COORD_TOKEN
    if geometry is Geometry.BBOX:
        return DropReason.BBOX_DEGENERATE if bins[2] <= bins[0] or bins[3] <= bins[1] else None
    return None if _twice_area(bins) else DropReason.POLY_DEGENERATE


def _twice_area(bins: Sequence[int]) -> int:
    """Twice the signed area (shoelace) of x y x y ...

    >>> _twice_area([0, 0, 4, 0, 4, 3, 0, 3]), _twice_area([0, 0, 1, 1, 2, 2])
    (24, 0)
    """
    xs, ys = bins[0::2], bins[1::2]
    next_xs, next_ys = [*xs[1:], xs[0]], [*ys[1:], ys[0]]
    return sum(x * next_y - next_x * y for x, y, next_x, next_y in zip(xs, ys, next_xs, next_ys, strict=True))
