"""How sure the model was of each object: a score from the probabilities of the tokens that it sampled. Needs no torch.

The score of an object is the geometric mean of the probabilities of its description's and its coordinates' tokens; the
JSON around them does not count. Long descriptions and polygons are not at a disadvantage, as in a product they were.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from rollmatch.model.vocabulary import Vocabulary
from rollmatch.records import PredictedObject, Rollout

Span = tuple[int, int]
"""First byte, and the one after the last."""


def object_scores(objects: Sequence[PredictedObject], rollout: Rollout, vocabulary: Vocabulary) -> tuple[float, ...]:
    """[len(objects)] scores in 0..1, all 1 where the rollout has no log-probabilities."""
    logprobs = rollout.response_logprobs
    if logprobs is None:
        return (1.0,) * len(objects)
    ids = rollout.response_token_ids
    starts = list(accumulate((len(vocabulary.piece(token_id)) for token_id in ids), initial=0))
    found = []
    for each in objects:
        tokens = tokens_in([*each.spans, each.desc_span], starts)
        found.append(math.exp(math.fsum(logprobs[token] for token in tokens) / len(tokens)))
    return tuple(found)


def tokens_in(spans: Sequence[Span], starts: Sequence[int]) -> list[int]:
    """Tokens that share a byte with a span, ascending; ``starts`` are the tokens' first bytes and the whole length.

    Tokens of 3, 2 and 4 bytes; bytes 4 and 5 lie in the second and the third:

    >>> tokens_in([(4, 6)], [0, 3, 5, 9])
    [1, 2]
    """
    touched = (range(bisect_right(starts, low) - 1, bisect_left(starts, high)) for low, high in spans)
    return sorted({token for tokens in touched for token in tokens})
