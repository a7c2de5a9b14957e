"""The text of a response -> the elements of its list and how it ended, by the strict rules of JSON.

What ``parse`` states about elements that are not JSON, truncation and trailing text is decided here, on characters.
"""

import json
import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple, NoReturn

OPENING_MARKS = ("{", '"objects"', ":", "[")
_CLOSING_MARKS = ("]", "}")
MAX_DEPTH = 32
"""Levels of nesting an element may have."""
_WHITESPACE = re.compile(r"[ \t\n\r]*")
_UNFINISHED = re.compile(
    r'[ \t\n\r]*(?:"(?:[^"\\]|\\.)*\\?|(?<=\\)u[0-9a-fA-F]{0,4}|-|tr?u?|fa?l?s?|nu?l?|(?<=\d)(?:\.|[eE][+-]?))?',
    re.DOTALL,
)
"""What may stand between the place of a JSON error and the end of a text that only ran out."""


class Ending(StrEnum):
    CLOSED = "closed"
    TRUNCATED = "truncated"
    MALFORMED = "malformed"
    TRAILING_TEXT = "trailing_text"


class JsonObject(NamedTuple):
    """A JSON object with its duplicate keys."""

    pairs: list[tuple[str, Any]]


class Element(NamedTuple):
    start: int
    end: int
    value: Any


def _skip_whitespace(text: str, place: int) -> int:
    found = _WHITESPACE.match(text, place)
    return found.end() if found else place


def expect(text: str, place: int, marks: Iterable[str]) -> tuple[int, Ending]:
    """Read marks with white space between them; CLOSED if all of them are there.

    >>> expect('{ "objects": [1', 0, OPENING_MARKS)
    (14, <Ending.CLOSED: 'closed'>)
    >>> expect('{ "obj', 0, OPENING_MARKS)
    (2, <Ending.TRUNCATED: 'truncated'>)
    """
    for mark in marks:
        place = _skip_whitespace(text, place)
        if not text.startswith(mark, place):
            return place, Ending.TRUNCATED if mark.startswith(text[place:]) else Ending.TRAILING_TEXT
        place += len(mark)
    return place, Ending.CLOSED


def scan_elements(text: str, opened: int) -> tuple[list[Element], Ending]:
    """The elements of the list that opened just before ``opened``, and how the text went on after them.

    >>> scan_elements('[1, "b"], x', 1)
    ([Element(start=1, end=2, value=1), Element(start=4, end=7, value='b')], <Ending.TRAILING_TEXT: 'trailing_text'>)
    """
    elements: list[Element] = []
    place = _skip_whitespace(text, opened)
    if text.startswith("]", place):
        return elements, _read_closing(text, place)
    while True:
        element = _read_element(text, place)
        if isinstance(element, Ending):
            return elements, element
        elements.append(element)
        place = _skip_whitespace(text, element.end)
        if not text.startswith(",", place):
            return elements, _read_closing(text, place)
        place = _skip_whitespace(text, place + 1)


def _read_closing(text: str, place: int) -> Ending:
    if place < len(text) and text[place] != "]":
        return Ending.MALFORMED
    place, ending = expect(text, place, _CLOSING_MARKS)
    if ending is Ending.CLOSED and _skip_whitespace(text, place) < len(text):
        return Ending.TRAILING_TEXT
    return ending


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=JsonObject, parse_constant=_refuse_constant)


def _read_element(text: str, start: int) -> Element | Ending:
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return Ending.TRUNCATED if _UNFINISHED.fullmatch(text, error.pos) else Ending.MALFORMED
    except (ValueError, RecursionError):
        return Ending.MALFORMED
    if _is_too_deep(value):
        return Ending.MALFORMED
    if not isinstance(value, (JsonObject, list, str)) and text[end : end + 1] not in (*" \t\n\r,]",):
        return Ending.TRUNCATED if _UNFINISHED.fullmatch(text, end) else Ending.MALFORMED
    return Element(start, end, value)


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return False
    return True


def _children(value: Any) -> list[Any]:
    if isinstance(value, JsonObject):
        return [child for _, child in value.pairs]
    return value if isinstance(value, list) else []
