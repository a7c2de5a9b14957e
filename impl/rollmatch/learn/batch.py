"""Segments -> the forward passes of one optimizer step: packed rows, or padded batches where packing is off."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from rollmatch.learn.collate import make_model_inputs, make_padded_inputs
from rollmatch.learn.loss import LossTotals, count_totals, logit_indices
from rollmatch.learn.mask import BinOf, MaskRules, mask_padded, mask_row
from rollmatch.learn.pack import Packer
from rollmatch.records import Row, Sample, Segment, Supervision
from rollmatch.template import ImageFeatures

FeaturesOf = Callable[[Sample], ImageFeatures]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass. ``is_packed``: logits are wanted only where something is supervised."""

    inputs: dict[str, Any]
    supervision: Supervision
    segments: tuple[Segment, ...]
    num_tokens: int
    fill: float
    """Tokens per place: of the row's capacity, or of the padded rectangle."""
    is_packed: bool


class Batcher:
    """Makes the micro-batches of an optimizer step; holds the packing buffer between steps."""

    def __init__(
        self, model: torch.nn.Module, *, packer: Packer | None, rules: MaskRules, bin_of: BinOf, pad_id: int
    ) -> None:
        self.model = model
        self.packer = packer
        self.rules = rules
        self.bin_of = bin_of
        self.pad_id = pad_id

    def make(self, segments: Sequence[Segment], features_of: FeaturesOf, *, num_batches: int) -> list[MicroBatch]:
        """Exactly ``num_batches`` micro-batches. Errors: those of ``Packer.add``; the buffer is then unchanged."""
        if self.packer is None:
            return [self._padded(part, features_of) for part in split_evenly(segments, num_batches)]
        self.packer.add(segments)
        rows = [self.packer.pop_row(rows_to_follow=left) for left in reversed(range(num_batches))]
        return [self._packed(row, features_of) for row in rows]

    def _packed(self, row: Row, features_of: FeaturesOf) -> MicroBatch:
        supervision = mask_row(row, rules=self.rules, bin_of=self.bin_of)
        images = [features_of(segment.sample) for segment in row.segments]
        inputs = make_model_inputs(row, images=images, model=self.model)
        kept = torch.tensor(logit_indices(supervision), dtype=torch.int64, device=inputs["input_ids"].device)
        return MicroBatch(
            inputs=inputs | {"logits_to_keep": kept},
            supervision=supervision,
            segments=row.segments,
            num_tokens=row.num_tokens,
            fill=row.fill,
            is_packed=True,
        )

    def _padded(self, segments: Sequence[Segment], features_of: FeaturesOf) -> MicroBatch:
        images = [features_of(segment.sample) for segment in segments]
        inputs = make_padded_inputs(segments, images=images, model=self.model, pad_id=self.pad_id)
        num_tokens = sum(segment.encoded_len for segment in segments)
        return MicroBatch(
            inputs=inputs,
            supervision=mask_padded(segments, rules=self.rules, bin_of=self.bin_of),
            segments=tuple(segments),
            num_tokens=num_tokens,
            fill=num_tokens / inputs["input_ids"].numel(),
            is_packed=False,
        )


def total_of(batches: Sequence[MicroBatch], sum_over_ranks: Callable[[Sequence[float]], list[float]]) -> LossTotals:
    """What the whole optimizer step supervises: all micro-batches of all ranks."""
    mine = count_totals(batch.supervision for batch in batches)
    text_weight, num_slots = sum_over_ranks([mine.text_weight, float(mine.num_slots)])
    return LossTotals(text_weight=text_weight, num_slots=round(num_slots))


def split_evenly(segments: Sequence[Segment], num_parts: int) -> list[Sequence[Segment]]:
    """Contiguous parts whose sizes differ by at most one, larger ones first.

    >>> split_evenly([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    size, extra = divmod(len(segments), num_parts)
    starts = [part * size + min(part, extra) for part in range(num_parts + 1)]
    return [segments[start:end] for start, end in pairwise(starts)]
