"""Fewer points for long runs: real ones, and never without the extremes."""

from collections.abc import Sequence

Column = Sequence[float | None]


def thin(columns: Sequence[Column], *, limit: int) -> tuple[int, ...]:
    """Indices of about ``limit`` rows to keep, ascending: per stretch each column's smallest and largest value.

    The first and the last row always stay. All columns have the same length; rows up to ``limit`` stay as they are.

    >>> thin([[0, 9, 1, 2, 3, -5, 4, 5]], limit=4)
    (0, 1, 5, 7)
    >>> thin([[3, None, 1]], limit=4)
    (0, 1, 2)
    """
    num_rows = len(columns[0]) if columns else 0
    if num_rows <= limit:
        return tuple(range(num_rows))
    num_stretches = max(1, limit // (2 * len(columns)))
    kept = {0, num_rows - 1}
    for stretch in range(num_stretches):
        rows = range(stretch * num_rows // num_stretches, (stretch + 1) * num_rows // num_stretches)
        for column in columns:
            kept.update(_extremes(column, rows))
    return tuple(sorted(kept))


def _extremes(column: Column, rows: range) -> set[int]:
    known = [(value, row) for row in rows if (value := column[row]) is not None]
    return {min(known)[1], max(known)[1]} if known else set()


def running_mean(column: Column, *, window: int) -> list[float | None]:
    """Mean of the known values in a window centred on each row; None where the row itself is unknown.

    >>> running_mean([1.0, 2.0, None, 6.0], window=3)
    [1.5, 1.5, None, 6.0]
    """
    means: list[float | None] = []
    for row, value in enumerate(column):
        around = column[max(0, row - window // 2) : row + window // 2 + 1]
        known = [number for number in around if number is not None]
        means.append(None if value is None else sum(known) / len(known))
    return means
