"""Where an output differs from the expected one."""

import json
import math
from collections.abc import Iterator
from typing import Any


def difference(expected: Any, got: Any, *, tolerance: float = 0.0) -> str:
    """The first place that differs, and both values; empty where nothing does. 1 and 1.0 are the same number.

    >>> difference({"rows": [[0, 1]]}, {"rows": [[0, 2]]})
    'output.rows[0][1]: expected 1, got 2'
    >>> difference({"a": 0.5}, {"a": 0.50001}, tolerance=1e-3), difference([1], [True])
    ('', 'output[0]: expected 1, got true')
    """
    return next(_differences(expected, got, tolerance, "output"), "")


def _differences(expected: Any, got: Any, tolerance: float, path: str) -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(got, dict):
        if "error" in got and "error" not in expected:
            yield f"{path}: expected an output, got the error {_shown(got['error'])}"
        for key in expected:
            if key not in got:
                yield f"{path}.{key}: expected {_shown(expected[key])}, got nothing"
            else:
                yield from _differences(expected[key], got[key], tolerance, f"{path}.{key}")
        yield from (f"{path}.{key}: expected no such key, got {_shown(got[key])}" for key in got if key not in expected)
    elif isinstance(expected, list) and isinstance(got, list):
        for place, (one, other) in enumerate(zip(expected, got, strict=False)):
            yield from _differences(one, other, tolerance, f"{path}[{place}]")
        if len(expected) != len(got):
            yield f"{path}: expected {len(expected)} entries, got {len(got)}"
    elif not _is_same(expected, got, tolerance):
        yield f"{path}: expected {_shown(expected)}, got {_shown(got)}"


def _is_same(expected: Any, got: Any, tolerance: float) -> bool:
    if _is_number(expected) and _is_number(got):
        return expected == got or math.isclose(expected, got, rel_tol=tolerance, abs_tol=tolerance)
    return type(expected) is type(got) and bool(expected == got)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return json.dumps(value)
