"""One response, as token ids -> the part one can append to, and the objects found in it. Needs no torch.

The one accepted form is that of the answer format, by default ``{"objects": [element, ...]}``. Nothing is ever
repaired:

==============================  =================================================================================
a control token                 the response ends before it; its literal spelled in ordinary tokens is just text
undecodable bytes               not JSON, wherever they stand, and neither is an id that only pads the embedding
a character cut short           by the end of the ids: truncation
a thought before the opening    context: ``<think>`` to ``</think>``, as Qwen3 and others write it
another opening                 invalid: prose, another first key, that key spelled with escapes
an element that is not JSON     the scan ends before it: truncated if the text ran out, else drop ``malformed``
no comma after an element       the element stays, the scan ends, drop ``malformed``
a bare number or word           counts once a delimiter follows: ``12`` may be the beginning of ``123``
more than 32 levels of nesting  not JSON, as readers of JSON have limits; the same for NaN, Infinity, endless integers
JSON, but no valid object       stays in the prefix as context, is no prediction, one ``DropReason``
anything after the closing      drop ``trailing_text``: prose, a second value, a second top-level key
==============================  =================================================================================

The prefix ends right after the last element that is JSON (or right after the opening bracket); JSON white space is
legal everywhere. Where that end falls inside a token, as merges across punctuation make it do all the time
(``"]}, {"`` may be one token), the ids before that token are the prefix, and its kept bytes, the *cut head*, are
written again as the beginning of the tail: so the rollout's ids are never touched, and what the model should have
said instead of that token gets a label. ``truncated`` says that the text ran out before the closing brace; ``invalid``
that the opening was not found: then no id is kept and the cut head is an opening of our own."""

import codecs
import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple, NoReturn, Protocol

from rollmatch.objectives.rollout_matching.answer_format import (
    COORD_TOKENS,
    AnswerFormat,
    DropReason,
    JsonObject,
    Slot,
    is_too_deep,
    judge,
)
from rollmatch.records import ParsedRollout, PredictedObject

_NUMBERS = re.compile(r'"(?:[^"\\]|\\.)*"|(-?[0-9]{1,9})')
"""Strings, to be passed over, and numbers; a number of more digits than any image has pixels falls apart."""
_KEY_OR_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"([ \t\n\r]*:)?')
_THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
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


class Element(NamedTuple):
    start: int
    end: int
    value: object


def _skip_whitespace(text: str, place: int) -> int:
    found = _WHITESPACE.match(text, place)
    return found.end() if found else place


def expect(text: str, place: int, marks: Iterable[str]) -> tuple[int, Ending]:
    """Read marks with white space between them; CLOSED if all of them are there.

    >>> expect('{ "objects": [1', 0, COORD_TOKENS.opening_marks)
    (14, <Ending.CLOSED: 'closed'>)
    >>> expect('{ "obj', 0, COORD_TOKENS.opening_marks)
    (2, <Ending.TRUNCATED: 'truncated'>)
    """
    for mark in marks:
        place = _skip_whitespace(text, place)
        if not text.startswith(mark, place):
            return place, Ending.TRUNCATED if mark.startswith(text[place:]) else Ending.TRAILING_TEXT
        place += len(mark)
    return place, Ending.CLOSED


def scan_elements(
    text: str, opened: int, closing_marks: Sequence[str] = COORD_TOKENS.closing_marks
) -> tuple[list[Element], Ending]:
    """The elements of the list that opened just before ``opened``, and how the text continued after them.

    >>> scan_elements('[1, "b"], x', 1)
    ([Element(start=1, end=2, value=1), Element(start=4, end=7, value='b')], <Ending.TRAILING_TEXT: 'trailing_text'>)
    """
    elements: list[Element] = []
    place = _skip_whitespace(text, opened)
    if text.startswith("]", place):
        return elements, _read_closing(text, place, closing_marks)
    while True:
        element = _read_element(text, place)
        if isinstance(element, Ending):
            return elements, element
        elements.append(element)
        place = _skip_whitespace(text, element.end)
        if not text.startswith(",", place):
            return elements, _read_closing(text, place, closing_marks)
        place = _skip_whitespace(text, place + 1)


def _read_closing(text: str, place: int, closing_marks: Sequence[str]) -> Ending:
    if place < len(text) and text[place] != "]":
        return Ending.MALFORMED
    place, ending = expect(text, place, closing_marks)
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
    if is_too_deep(value):
        return Ending.MALFORMED
    if not isinstance(value, (JsonObject, list, str)) and text[end : end + 1] not in (*" \t\n\r,]",):
        return Ending.TRUNCATED if _UNFINISHED.fullmatch(text, end) else Ending.MALFORMED
    return Element(start, end, value)


_NO_TEXT = b"\xff"  # never UTF-8
_UNDECODABLE, _CUT_SHORT = "\0", "\ufffd"  # the first is JSON nowhere, the second only inside a string


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResponseText:
    ids: tuple[int, ...]
    starts: tuple[int, ...]
    """[len(ids) + 1] first byte of each token, then the number of bytes."""
    text: str
    coord_tokens: tuple[Slot, ...]
    """Its coordinate tokens."""


class Pieces(Protocol):
    """As much of a ``Vocabulary`` as parsing needs."""

    @property
    def control_ids(self) -> Container[int]:
        """Ids of chat framing, at which a response ends."""

    def piece(self, token_id: int) -> bytes:
        """Bytes of a token."""

    def decode(self, token_ids: Iterable[int]) -> bytes:
        """Bytes of tokens."""

    def bin_of(self, token_id: int) -> int | None:
        """Bin of a coordinate token; None for any other."""


def parse_rollout(
    response_token_ids: Sequence[int], vocabulary: Pieces, answer_format: AnswerFormat = COORD_TOKENS
) -> ParsedRollout:
    """Parse one response strictly: objects with an error are dropped, never repaired (rules: top of this file)."""
    response = _read(response_token_ids, vocabulary)
    thought = _THOUGHT.match(response.text)
    opened, ending = expect(response.text, thought.end() if thought else 0, answer_format.opening_marks)
    if ending is not Ending.CLOSED:
        return _make_invalid(answer_format, truncated=ending is Ending.TRUNCATED)
    elements, ending = scan_elements(response.text, opened, answer_format.closing_marks)
    cut, *places = _byte_places(response.text, [opened, *(place for e in elements for place in (e.start, e.end))])
    cut = places[-1] if places else cut
    judged = [_judge(response, *found, answer_format) for found in zip(elements, places[::2])]
    drops = Counter(verdict.value for verdict in judged if isinstance(verdict, DropReason))
    if ending in (Ending.MALFORMED, Ending.TRAILING_TEXT):
        drops[ending.value] += 1
    kept, cut_head = _cut_at(response, cut, vocabulary)
    return ParsedRollout(
        prefix_token_ids=kept,
        cut_head=cut_head,
        prefix_text=(vocabulary.decode(kept) + cut_head).decode(),
        num_elements=len(elements),
        objects=tuple(verdict for verdict in judged if isinstance(verdict, PredictedObject)),
        drops=dict(drops),
        truncated=ending is Ending.TRUNCATED,
        invalid=False,
    )


def _judge(
    response: _ResponseText, element: Element, start: int, answer_format: AnswerFormat
) -> PredictedObject | DropReason:
    """``judge`` for an element that begins at byte ``start``."""
    slots_of = _tokens_in if answer_format.uses_tokens else _numbers_in
    verdict = judge(element.value, slots_of(response, element, start), answer_format)
    if isinstance(verdict, DropReason):
        return verdict
    return replace(verdict, desc_span=_desc_span_in(response, element, start, answer_format.desc_key))


def _make_invalid(answer_format: AnswerFormat, *, truncated: bool) -> ParsedRollout:
    return ParsedRollout(
        prefix_token_ids=(),
        cut_head=answer_format.opening.encode(),
        prefix_text=answer_format.opening,
        num_elements=0,
        objects=(),
        drops={},
        truncated=truncated,
        invalid=True,
    )


def _read(response_token_ids: Iterable[int], vocabulary: Pieces) -> _ResponseText:
    ids: list[int] = []
    pieces: list[bytes] = []
    for token_id in response_token_ids:
        if token_id in vocabulary.control_ids:
            break
        ids.append(token_id)
        pieces.append(vocabulary.piece(token_id) or _NO_TEXT)
    starts = tuple(accumulate(map(len, pieces), initial=0))
    bins = ((position, vocabulary.bin_of(token_id)) for position, token_id in enumerate(ids))
    return _ResponseText(
        ids=tuple(ids),
        starts=starts,
        text=_decode_head(b"".join(pieces)),
        coord_tokens=tuple(
            Slot(starts[position], starts[position + 1], position, k) for position, k in bins if k is not None
        ),
    )


def _decode_head(raw: bytes) -> str:
    r"""The longest head that is UTF-8, then one mark if anything follows it.

    >>> _decode_head(b"ab\xff]"), _decode_head(b"ab\xc3"), _decode_head(b"ab\xc3\xa9")
    ('ab\x00', 'ab\ufffd', 'ab\xe9')
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(raw)
    except UnicodeDecodeError as error:
        return raw[: error.start].decode() + _UNDECODABLE
    return text + _CUT_SHORT if decoder.getstate()[0] else text


def _byte_places(text: str, places: Sequence[int]) -> list[int]:
    r"""Ascending character places as byte places.

    >>> _byte_places("a\u00e9]", [0, 1, 2, 3])
    [0, 1, 3, 4]
    """
    spans = zip([0, *places], places)
    return list(accumulate(len(text[start:end].encode()) for start, end in spans))


def _tokens_in(response: _ResponseText, element: Element, start: int) -> tuple[Slot, ...]:
    """The coordinate tokens of an element that begins at byte ``start``."""
    end = start + len(response.text[element.start : element.end].encode())
    first, last = (bisect_left(response.coord_tokens, byte, key=lambda slot: slot.start) for byte in (start, end))
    return response.coord_tokens[first:last]


def _numbers_in(response: _ResponseText, element: Element, start: int) -> tuple[Slot, ...]:
    """The numbers outside of strings in an element that begins at byte ``start``."""
    text = response.text[element.start : element.end]
    found = [(match.start(1), match[1]) for match in _NUMBERS.finditer(text) if match[1]]
    firsts = [start + place for place in _byte_places(text, [place for place, _ in found])]
    return tuple(
        Slot(first, first + len(digits), bisect_right(response.starts, first) - 1, int(digits))
        for first, (_, digits) in zip(firsts, found)
    )


def _desc_span_in(response: _ResponseText, element: Element, start: int, desc_key: str) -> tuple[int, int]:
    """Bytes of the description of a valid object, which is the string behind its key; quotes apart."""
    text = response.text[element.start : element.end]
    strings = _KEY_OR_STRING.finditer(text)
    next(key for key in strings if key[2] and json.loads(f'"{key[1]}"') == desc_key)
    first, after = _byte_places(text, next(strings).span(1))
    return start + first, start + after


def _cut_at(response: _ResponseText, cut: int, vocabulary: Pieces) -> tuple[tuple[int, ...], bytes]:
    """The ids that end at or before byte ``cut``, and the bytes from there to the cut.

    With tokens of 3, 2 and 4 bytes (starts 0, 3, 5, 9): cut 5 keeps two ids and no bytes; cut 6 keeps two ids and the
    third's first byte.
    """
    place = bisect_left(response.starts, cut)
    if response.starts[place] == cut:
        return response.ids[:place], b""
    return response.ids[: place - 1], vocabulary.piece(response.ids[place - 1])[: cut - response.starts[place - 1]]
