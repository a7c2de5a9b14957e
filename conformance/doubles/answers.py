"""Answers and broken answers, as text, as ids and as Hypothesis strategies.

A strategy is made once and has all its parts from the start: one that is made for each example, to fit what was
drawn before, is also validated for each, which takes longer than to draw from it.
"""

import unicodedata
from functools import cache

from hypothesis import strategies as st

from conformance.doubles.tokenizer import CONTROL_TOKENS, FUSED, ids_of_bytes, make_vocabulary
from rollmatch.model.vocabulary import coord_token
from rollmatch.objectives.rollout_matching.target import serialize_objects
from rollmatch.records import Geometry, GroundTruth

BOX = (100, 100, 300, 300)
FAR_BOX = (600, 600, 900, 900)
UNKNOWN_ID = 10**6
"""A token id that the tokenizer does not have, as a padded embedding table may sample it."""


def box(*bins, desc="seven"):
    return GroundTruth(desc=desc, geometry=Geometry.BBOX, bins=bins or BOX)


def poly(*bins, desc="leaf"):
    return GroundTruth(desc=desc, geometry=Geometry.POLY, bins=bins or (100, 100, 300, 100, 300, 300))


def quoted(*bins):
    """The values of a geometry as they stand in JSON."""
    return ", ".join(f'"{coord_token(k)}"' for k in bins)


def answer(*elements):
    return '{"objects": [' + ", ".join(elements) + "]}"


def element(*bins, desc="seven"):
    return f'{{"desc": "{desc}", "bbox_2d": [{quoted(*(bins or BOX))}]}}'


def ids(text):
    return make_vocabulary().encode(text)


@cache
def descs():
    """Legal descriptions in every script, in NFC, without what the tail refuses."""
    text = st.text(
        st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Cn")) | st.sampled_from('\u00e9"\\[]{},: <|>'),
        min_size=1,
        max_size=8,
    )
    return text.map(lambda s: unicodedata.normalize("NFC", s)).filter(str.strip)


@cache
def boxes():
    pairs = st.tuples(st.integers(0, 998), st.integers(1, 400))
    sides = pairs.map(lambda pair: (pair[0], min(999, pair[0] + pair[1])))
    return st.builds(lambda d, x, y: box(x[0], y[0], x[1], y[1], desc=d), descs(), sides, sides)


@cache
def polys():
    point = st.tuples(st.integers(0, 999), st.integers(0, 999))
    points = st.lists(point, min_size=3, max_size=6).filter(lambda ps: _twice_area(ps) != 0)
    return st.builds(lambda d, ps: poly(*(k for p in ps for k in p), desc=d), descs(), points)


def _twice_area(points):
    shifted = [*points[1:], points[0]]
    return sum(x * v - u * y for (x, y), (u, v) in zip(points, shifted, strict=True))


@cache
def object_lists(max_size=4):
    return st.lists(boxes() | polys(), max_size=max_size)


_SNIPPETS = (
    *'{}[],:"\\ \n1',
    "true",
    "12",
    "\u00e9",
    '"desc": "x"',
    '"bbox_2d": [',
    "null, ",
    ', "objects": [',
    '{"objects": [',
    element(),
    "]}",
    coord_token(5),
    "<|coord_5",
)


PLACES = st.integers(0, 999)
"""Places in what is drawn beside them, whatever its length: taken modulo what is possible there."""


def broken_texts():
    """An answer's text with up to four cuts, insertions and deletions."""
    edits = st.lists(st.tuples(PLACES, st.integers(0, 6), st.just("") | st.sampled_from(_SNIPPETS)), max_size=4)
    return st.builds(_break, object_lists(max_size=3).map(serialize_objects), edits, st.none() | PLACES)


def _break(whole, edits, cut):
    """``whole`` with parts in place of others; a text or token ids."""
    for place, length, part in edits:
        place %= len(whole) + 1
        whole = whole[:place] + part + whole[place + length :]
    return whole if cut is None else whole[: cut % (len(whole) + 1)]


@cache
def tokens():
    """Any token: bytes, fused punctuation, coordinates, control tokens, ids beyond the tokenizer."""
    vocabulary = make_vocabulary()
    fused = st.sampled_from(FUSED).map(lambda raw: vocabulary.encode_bytes(raw)[0])
    special = st.sampled_from(CONTROL_TOKENS).map(lambda text: vocabulary.encode(text)[0])
    single = st.integers(0, 255).map(lambda byte: ids_of_bytes(bytes([byte]))[0])
    return single | fused | st.sampled_from(vocabulary.coord_ids) | special | st.just(UNKNOWN_ID)


def responses():
    """Token ids as a model may write them: an answer, broken in its text and then in its ids."""
    parts = st.lists(tokens(), max_size=2).map(tuple)
    edits = st.lists(st.tuples(PLACES, st.integers(0, 2), parts), max_size=3)
    return st.builds(_break, broken_texts().map(ids), edits, st.none())
