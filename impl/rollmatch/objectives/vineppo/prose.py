r"""Sentences of a mathematical text, as places in its bytes; LaTeX is not cut in mid-formula.

A sentence begins at a line feed outside mathematics, after a full stop that a capital follows, and after a formula that
ends with a full stop. Pieces that are too short join the next one, pieces that are too long are broken near their
middle. The rules follow what VinePPO's authors describe for MATH; bytes stand for characters, so that a place is a
place in the sampled tokens.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

SHORTEST, LONGEST = 20, 100
LEAST_HALF_OF_WORDS, LEAST_HALF_OF_MATH = 40, 20
_MATH = re.compile(
    rb"\[asy\].*?\[/asy\]|\\begin\{([A-Za-z]+\*?)\}.*?\\end\{\1\}|\\\[.*?\\\]|\\\(.*?\\\)|\$\$.+?\$\$|(?<!\\)\$[^$]+\$",
    re.DOTALL,
)
LINE_START = re.compile(rb"\n\s*(?=\S)")
"""A line begins at the line feed before it; empty lines belong to the one that follows them."""
_STOP = re.compile(rb"(?<!\b[A-Za-z])(?<!\.[A-Za-z])\.(?=\s+[A-Z\\$])")
_ENDED_FORMULA = re.compile(rb"\.\s*(?:\$\$|\$|\\\]|\\\)|\\end\{[A-Za-z]+\*?\})\Z")
_WORD_BREAKS = (rb", ", rb" and ", rb": ", rb" to ")
_MATH_BREAKS = (rb",\$", rb",\\\)", rb",\\\]", rb"=", rb"\\equiv", rb"\+", rb"\\cancelto")


def sentence_starts(text: bytes) -> list[int]:
    r"""Bytes at which sentences begin, the first one left out; white space belongs to what follows it.

    >>> text = b"We know that $f(x. Y) = 2$ holds. Then we can add 1 to it.\nSo it is 3."
    >>> [text[a:b] for a, b in pairwise([0, *sentence_starts(text), len(text)])]
    [b'We know that $f(x. Y) = 2$ holds.', b' Then we can add 1 to it.', b'\nSo it is 3.']
    """
    formulas = [found.span() for found in _MATH.finditer(text)]
    starts = _outside(formulas, [found.start() for found in LINE_START.finditer(text)])
    starts += _outside(formulas, [found.end() for found in _STOP.finditer(text)])
    starts += [stop for start, stop in formulas if _ENDED_FORMULA.search(text, start, stop)]
    for start, stop in formulas:
        if stop - start > LONGEST:
            starts += [found.start() for found in LINE_START.finditer(text, start, stop)]
    return _broken(text, _joined(text, sorted(set(starts))))


def _outside(spans: Sequence[tuple[int, int]], places: Sequence[int]) -> list[int]:
    return [place for place in places if not any(start < place < stop for start, stop in spans)]


def _joined(text: bytes, starts: Sequence[int]) -> list[int]:
    """Without the starts that would leave a short piece before them, unless it ends with a full stop.

    >>> _joined(b"A line that is long enough. ab", [28]), _joined(b"A line that is long enough. abc", [28])
    ([], [28])
    """
    kept: list[int] = []
    for start in starts:
        piece = text[kept[-1] if kept else 0 : start].strip()
        if len(piece) >= SHORTEST or (len(piece) >= 3 and (piece.endswith(b".") or _ENDED_FORMULA.search(piece))):
            kept.append(start)
    if kept and len(text[kept[-1] :].strip()) < 3:
        kept.pop()
    return kept


def _broken(text: bytes, starts: Sequence[int]) -> list[int]:
    bounds = [0, *starts, len(text)]
    return sorted({*starts, *(place for a, b in pairwise(bounds) for place in _breaks(text, a, b))})


def _breaks(text: bytes, start: int, stop: int) -> list[int]:
    """Places at which a piece is broken until none is too long, or none can be broken."""
    if stop - start <= LONGEST:
        return []
    place = _middle(text, start, stop)
    if place is None:
        return []
    return [*_breaks(text, start, place), place, *_breaks(text, place, stop)]


def _middle(text: bytes, start: int, stop: int) -> int | None:
    formulas = [found.span() for found in _MATH.finditer(text, start, stop)]
    words = _outside(formulas, _ends(_WORD_BREAKS, text, start, stop))
    return _nearest(words, start, stop, LEAST_HALF_OF_WORDS) or _nearest(
        _ends(_MATH_BREAKS, text, start, stop), start, stop, LEAST_HALF_OF_MATH
    )


def _ends(patterns: Sequence[bytes], text: bytes, start: int, stop: int) -> list[int]:
    return [found.end() for pattern in patterns for found in re.compile(pattern).finditer(text, start, stop)]


def _nearest(places: Sequence[int], start: int, stop: int, least: int) -> int | None:
    fitting = [place for place in places if place - start >= least and stop - place >= least]
    return min(fitting, key=lambda place: (abs(2 * place - start - stop), place)) if fitting else None
