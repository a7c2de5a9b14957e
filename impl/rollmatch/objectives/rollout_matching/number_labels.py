"""Which token each place of a matched number should have held, where coordinates are numbers of several tokens.

A wrong digit makes what follows it meaningless: behind the 4 of ``145`` no digit says anything about a true ``137``. So
a number is supervised from its first token up to and including the first one where it leaves the true number, and not
behind it. With ``y`` the sampled tokens from the number's first one, and ``u`` the tokens of the true text (the
true number in place of the sampled one, up to the end of the token that holds the delimiter)::

    m        = the first k with y[k] != u[k], or the last k where there is none
    label[k] = u[k]          for k <= m
    label[k] = unsupervised  for k > m

The delimiter counts: a number that ends too early leaves the true one there.

=========  ========  ======================
sampled    true      labels
=========  ========  ======================
``145,``   ``137,``  ``1 3``, then none
``13,``    ``137,``  ``1 3 7``
``1375,``  ``137,``  ``1 3 7 ,``, then none
``137,``   ``137,``  ``1 3 7 ,``
=========  ========  ======================

Needs no torch.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from rollmatch.model.vocabulary import Vocabulary

IGNORED = -100
"""Label of a position without text supervision, as torch's cross-entropy reads it."""


class TrueNumber(NamedTuple):
    """Where a number stands in a target, and what it should have been."""

    start: int
    """First byte."""
    end: int
    """Byte after the last one: the delimiter's first."""
    number: int


def label_numbers(
    target_ids: Sequence[int], numbers: Sequence[TrueNumber], vocabulary: Vocabulary
) -> list[tuple[int, int]]:
    """(index into ``target_ids``, label or -100) of the tokens of these numbers, ascending, as the numbers are.

    ``target_ids`` are prefix and tail: where the delimiter's token is cut off the prefix, the tail holds it.
    """
    pieces = [vocabulary.piece(token_id) for token_id in target_ids]
    starts = list(accumulate(map(len, pieces), initial=0))
    text = b"".join(pieces)
    labels: dict[int, int] = {}
    for start, end, number in numbers:
        first = bisect_right(starts, start) - 1
        if labels.get(first, target_ids[first]) != target_ids[first]:
            continue  # the number before has left its truth in this very token
        after = _token_border(starts, end, text)
        true_text = text[starts[first] : start] + str(number).encode() + text[end : starts[after]]
        labels |= _labels_of(target_ids[first:after], vocabulary.encode_bytes(true_text), first=first)
    return sorted(labels.items())


def _labels_of(sampled: Sequence[int], true: Sequence[int], *, first: int) -> dict[int, int]:
    """The rule at the top of this file, for one number whose first token is the target's ``first``.

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
