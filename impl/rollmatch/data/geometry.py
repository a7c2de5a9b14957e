"""Rules of boxes and polygons, in coordinate bins."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from rollmatch.errors import DataError
from rollmatch.records import NUM_BINS, Geometry

BOX_LEN = 4
SHORTEST_POLY_LEN = 6


_COORD_LITERAL = re.compile(r"<\|coord_(0|[1-9][0-9]{0,2})\|>")


def geometry_of(item: dict[str, object]) -> Geometry | None:
    """Which of the two shapes an object has; None when it has none or both."""
    found = [geometry for geometry in Geometry if geometry in item]
    return found[0] if len(found) == 1 else None


def read_bin(value: Any) -> int | None:
    """One coordinate, None when it is not one.

    >>> read_bin(7), read_bin("<|coord_999|>"), read_bin(1000), read_bin("<|coord_007|>"), read_bin(True)
    (7, 999, None, None, None)
    """
    if isinstance(value, str) and (literal := _COORD_LITERAL.fullmatch(value)) is not None:
        return int(literal.group(1))
    is_bin = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < NUM_BINS
    return value if is_bin else None


def check_geometry(item: dict[str, object], *, key: str, place: str) -> Iterator[DataError]:
    """Broken rules of one object's shape; ``place`` says where in the record it stands."""
    geometry = geometry_of(item)
    if geometry is None:
        problem = f"{place} must have exactly one of bbox_2d and poly"
        yield DataError(problem, code="geometry-not-single", key=key, remedy="Give it one of the two.")
        return
    values = item[geometry]
    if not isinstance(values, list) or not _fits(geometry, len(values)):
        wanted = "4 numbers" if geometry is Geometry.BBOX else "an even number of coordinates, at least 6"
        problem = f"{place}: {geometry} must be a list of {wanted}, but is {values!r}"
        yield DataError(problem, code="geometry-length", key=key, remedy="Write x and y of each corner in turn.")
        return
    yield from _check_poly_points(item, key=key, place=place)
    wrong = [value for value in values if read_bin(value) is None]
    if wrong:
        problem = f"{place}: {geometry} holds {wrong[0]!r}, which is no coordinate"
        remedy = "Use whole numbers 0..999 (pixel / (side - 1) * 999, rounded) or <|coord_0|> .. <|coord_999|>."
        yield DataError(problem, code="bin-invalid", key=key, remedy=remedy)
    else:
        yield from _check_area(geometry, bins_of(values), key=key, place=place)


def bins_of(values: Sequence[object]) -> tuple[int, ...]:
    """Coordinates that were checked, as bins."""
    return tuple(bin_ for bin_ in map(read_bin, values) if bin_ is not None)


def twice_area(bins: Sequence[int]) -> int:
    """Twice the signed area of a polygon (shoelace formula).

    >>> twice_area((0, 0, 4, 0, 4, 3)), twice_area((0, 0, 2, 2, 5, 5))
    (12, 0)
    """
    xs, ys = bins[0::2], bins[1::2]
    return sum(xs[i - 1] * ys[i] - xs[i] * ys[i - 1] for i in range(len(xs)))


def box_around(corners: Sequence[int]) -> tuple[int, int, int, int]:
    """[x1, y1, x2, y2] around x y x y ... of a polygon's corners, or of two corners of a box.

    >>> box_around((1, 2, 9, 2, 9, 8)), box_around((1, 2, 5, 8))
    ((1, 2, 9, 8), (1, 2, 5, 8))
    """
    xs, ys = corners[0::2], corners[1::2]
    return min(xs), min(ys), max(xs), max(ys)


def _fits(geometry: Geometry, num_values: int) -> bool:
    if geometry is Geometry.BBOX:
        return num_values == BOX_LEN
    return num_values >= SHORTEST_POLY_LEN and num_values % 2 == 0


def _check_poly_points(item: dict[str, Any], *, key: str, place: str) -> Iterator[DataError]:
    if "poly_points" not in item:
        return
    num_points = len(item[Geometry.POLY]) // 2 if Geometry.POLY in item else None
    given = item["poly_points"]
    if num_points is None or isinstance(given, bool) or given != num_points:
        wanted = "must not stand beside a box" if num_points is None else f"must be {num_points}"
        problem = f"{place}: poly_points {wanted}, but is {given!r}"
        yield DataError(problem, code="poly-points-mismatch", key=key, remedy="Correct it, or leave it out.")


def _check_area(geometry: Geometry, bins: tuple[int, ...], *, key: str, place: str) -> Iterator[DataError]:
    if geometry is Geometry.POLY:
        if twice_area(bins) == 0:
            problem = f"{place}: the polygon {list(bins)} encloses no area"
            yield DataError(
                problem, code="poly-without-area", key=key, remedy="Correct its points, or remove the object."
            )
        return
    left, top, right, bottom = bins
    if right <= left or bottom <= top:
        problem = f"{place}: the box {list(bins)} must have x2 > x1 and y2 > y1"
        yield DataError(
            problem, code="box-without-area", key=key, remedy="Write it as [x1, y1, x2, y2], or remove the object."
        )
