"""Which token each place of a matched number or description should have held: text of several tokens, corrected.

A wrong digit makes what follows it meaningless: behind the 4 of ``145`` no digit says anything about a true ``137``. So
a text is supervised from its first token up to and including the first one where it leaves the true text, and not
behind it. With ``y`` the sampled tokens from the text's first one, and ``u`` the tokens of the true text in its place,
up to the end of the token that holds the delimiter::

    m        = the first k with y[k] != u[k], or the last k where there is none
    label[k] = u[k]          for k <= m
    label[k] = unsupervised  for k > m

The delimiter counts: a number that ends too early leaves the true one there.

===========  ===========  ======================
sampled      true         labels
===========  ===========  ======================
``145,``     ``137,``     ``1 3``, then none
``13,``      ``137,``     ``1 3 7``
``1375,``    ``137,``     ``1 3 7 ,``, then none
``137,``     ``137,``     ``1 3 7 ,``
``sixty"``   ``six"``     ``six "``, then none
===========  ===========  ======================

Needs no torch.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from rollmatch.model.vocabulary import Vocabulary

IGNORED = -100
"""Label of a position without text supervision, as torch's cross-entropy reads it."""


class Correction(NamedTuple):
    """Where a number or a description stands in a target, and what it should have been."""

    start: int
    """First byte."""
    end: int
    """Byte after the last one: the delimiter's first."""
    text: str
    is_desc: bool = False


class CorrectedToken(NamedTuple):
    """One token of a corrected text."""

    position: int
    """Index into the target's ids."""
    label: int
    """The token that should have stood there, or -100."""
    is_desc: bool


def label_corrections(
    target_ids: Sequence[int], corrections: Sequence[Correction], vocabulary: Vocabulary
) -> list[CorrectedToken]:
    """The tokens of these texts, ascending, as the texts are.

    ``target_ids`` are prefix and tail: where the delimiter's token is cut off the prefix, the tail holds it.
    """
    pieces = [vocabulary.piece(token_id) for token_id in target_ids]
    starts = list(accumulate(map(len, pieces), initial=0))
    text = b"".join(pieces)
    found: dict[int, CorrectedToken] = {}
    for start, end, wanted, is_desc in corrections:
        first = bisect_right(starts, start) - 1
        if first in found and found[first].label != target_ids[first]:
            continue  # the text before has left its truth in this very token
        after = _token_border(starts, end, text)
        true_text = text[starts[first] : start] + wanted.encode() + text[end : starts[after]]
        labels = _labels_of(target_ids[first:after], vocabulary.encode_bytes(true_text), first=first)
        found |= {position: CorrectedToken(position, label, is_desc) for position, label in labels.items()}
    return [found[position] for position in sorted(found)]


def _labels_of(sampled: Sequence[int], true: Sequence[int], *, first: int) -> dict[int, int]:
    """The rule at the top of this file, for one text whose first token is the target's ``first``.

    >>> _labels_of([1, 4, 5, 0], [1, 3, 7, 0], first=20)
    {20: 1, 21: 3, 22: -100, 23: -100}
    >>> _labels_of([1, 3, 0], [1, 3, 7, 0], first=20)
    {20: 1, 21: 3, 22: 7}
    >>> _labels_of([1, 3, 7, 5, 0], [1, 3, 7, 0], first=20)
    {20: 1, 21: 3, 22: 7, 23: 0, 24: -100}
    """
    pairs = zip(sampled, true, strict=False)
    leaves = next((place for place, (mine, wanted) in enumerate(pairs) if mine != wanted), len(true))
    return {first + place: true[place] if place <= leaves else IGNORED for place in range(len(sampled))}


def _token_border(starts: Sequence[int], byte: int, text: bytes) -> int:
    """The first token behind the one that holds ``byte`` that does not begin in mid-character.

    With tokens of 3, 1 and 2 bytes, byte 2 lies in the first one; the second begins with the second byte of an e acute:

    >>> _token_border([0, 3, 4, 6], 2, "1,\u00e9].".encode())
    2
    """
    after = bisect_right(starts, byte)
    while after < len(starts) - 1 and 0x80 <= text[starts[after]] < 0xC0:
        after += 1
    return after
