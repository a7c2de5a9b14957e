"""Coordinate tokens for a model that has none: 1,000 tokens whose embeddings begin as places on the way from 0 to 9.

A bin is placed on the path that joins the embeddings of the digits 0 to 9, at two scales: once over the whole image,
and ten times, forth and back, so that nothing is jumped over. Neighbours therefore begin near each other, and rows have
the norm of digits, so that the new tokens are as likely as digits are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rollmatch.errors import ConfigError
from rollmatch.model.vocabulary import coord_token
from rollmatch.records import NUM_BINS

if TYPE_CHECKING:  # seconds to load
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROWS_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this many rows."""
SCALES = ((1, 0.6), (10, 0.4))
"""Times that the path is walked from bin 0 to bin 999, and the weight of that walk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedCoordinates:
    """What was added."""

    first_id: int
    num_rows_before: int
    num_rows: int
    is_tied: bool
    cosine_of_neighbours: float
    """Mean cosine of the embeddings of bins 1 apart."""
    cosine_of_distant: float
    """Of bins 500 apart."""


def add_tokens(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """[1000] ids of the added tokens, by bin. Errors: ``coord-tokens-present``."""
    from tokenizers import AddedToken

    literals, present = [coord_token(k) for k in range(NUM_BINS)], tokenizer.get_vocab()
    known = [literal for literal in literals if literal in present]
    if known:
        raise ConfigError(
            f"the tokenizer has {len(known)} of the {NUM_BINS} coordinate tokens, first {known[0]}",
            code="coord-tokens-present",
            key="MODEL",
            remedy="Train this model as it is, or name the model that it was made from.",
        )
    tokenizer.add_tokens([AddedToken(literal, special=False, normalized=False) for literal in literals])
    return [int(token_id) for token_id in tokenizer.convert_tokens_to_ids(literals)]


@torch.no_grad()
def add_rows(model: "PreTrainedModel", ids: Sequence[int], digit_ids: Sequence[int]) -> AddedCoordinates:
    """Give a model rows for the ids of the bins, in the embedding and in a head of its own.

    ``digit_ids`` are the tokens of 0 to 9. Rows that only pad get the mean row.
    """
    embedding = cast(nn.Module, model.get_input_embeddings())
    num_before, head = len(cast(Tensor, embedding.weight)), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    num_rows = max(num_before, ceil((max(ids) + 1) / ROWS_MULTIPLE) * ROWS_MULTIPLE)
    model.resize_token_embeddings(num_rows, mean_resizing=False)
    for part in (model.get_input_embeddings(), None if is_tied else model.get_output_embeddings()):
        if part is not None:
            weight = cast(Tensor, part.weight)
            weight[num_before:] = weight[:num_before].float().mean(0).to(weight.dtype)
            weight[list(ids)] = ordered_rows(weight[list(digit_ids)].float()).to(weight.dtype)
    rows = cast(Tensor, cast(nn.Module, model.get_input_embeddings()).weight)[list(ids)]
    return AddedCoordinates(
        first_id=ids[0],
        num_rows_before=num_before,
        num_rows=num_rows,
        is_tied=is_tied,
        cosine_of_neighbours=mean_cosine(rows, apart=1),
        cosine_of_distant=mean_cosine(rows, apart=NUM_BINS // 2),
    )


def mean_cosine(rows: Tensor, *, apart: int) -> float:
    """Of pairs of rows so many rows apart."""
    rows = functional.normalize(rows.float())
    return float((rows[:-apart] * rows[apart:]).sum(-1).mean())


def ordered_rows(digits: Tensor) -> Tensor:
    """[10, H] rows of the digits -> [1000, H] rows of the bins, with the digits' mean norm.

    Places on the path from 0 to 9 of some bins, by scale:

    >>> [[round(9 * _walk(k, times), 1) for times, _ in SCALES] for k in (0, 1, 99, 100, 999)]
    [[0.0, 0.0], [0.0, 0.1], [0.9, 8.9], [0.9, 9.0], [9.0, 0.0]]
    """
    rows = torch.zeros(NUM_BINS, digits.shape[1])
    for times, weight in SCALES:
        places = torch.tensor([_walk(k, times) for k in range(NUM_BINS)]) * (len(digits) - 1)
        low = places.long().clamp_max(len(digits) - 2)
        share = (places - low)[:, None]
        rows += weight * torch.lerp(digits[low], digits[low + 1], share)
    scaled: Tensor = functional.normalize(rows) * digits.norm(dim=-1).mean()
    return scaled


def _walk(coord_bin: int, times: int) -> float:
    """Place 0..1 of a bin on a path that is walked ``times`` times, forth and back in turn.

    >>> [_walk(k, 3) for k in (0, 333, 666, 999)]
    [0.0, 1.0, 0.0, 1.0]
    """
    walked = coord_bin / (NUM_BINS - 1) * times
    return 1 - abs(1 - walked % 2)
