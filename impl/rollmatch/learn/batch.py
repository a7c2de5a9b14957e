"""Segments -> the forward passes of one optimizer step: packed rows, or padded batches where packing is off."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch

from rollmatch.learn.collate import make_model_inputs, make_padded_inputs
from rollmatch.learn.mask import starts_of_padded
from rollmatch.learn.pack import Packer
from rollmatch.model.template import ImageFeatures
from rollmatch.records import Row, Sample, Segment

Item = TypeVar("Item")
FeaturesOf = Callable[[Sample], ImageFeatures]


class Supervisor(Protocol):
    """Says what segments are to learn. Its supervisions are its own business: the batcher only carries them."""

    def supervise(self, segments: Sequence[Segment], *, starts: Sequence[int], num_tokens: int) -> Any:
        """What a list of ``num_tokens`` tokens is to learn in which segment i starts at ``starts[i]``."""

    def logit_indices(self, supervision: Any) -> Sequence[int]:
        """Where the logits stand that it needs, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass. ``is_packed``: logits are wanted only where something is supervised."""

    inputs: dict[str, Any]
    supervision: Any
    """The objective's."""
    segments: tuple[Segment, ...]
    num_tokens: int
    fill: float
    """Tokens per place: of the row's capacity, or of the padded rectangle."""
    is_packed: bool


class Batcher:
    """Makes the micro-batches of an optimizer step; holds the packing buffer between steps."""

    def __init__(self, model: torch.nn.Module, supervisor: Supervisor, *, packer: Packer | None, pad_id: int) -> None:
        self.model = model
        self.supervisor = supervisor
        self.packer = packer
        self.pad_id = pad_id

    def make(self, segments: Sequence[Segment], features_of: FeaturesOf, *, num_batches: int) -> list[MicroBatch]:
        """Exactly ``num_batches`` micro-batches. Errors: those of ``Packer.add``; the buffer is then unchanged."""
        if self.packer is None:
            return [self._padded(part, features_of) for part in split_evenly(segments, num_batches)]
        self.packer.add(segments)
        rows = [self.packer.pop_row(rows_to_follow=left) for left in reversed(range(num_batches))]
        return [self._packed(row, features_of) for row in rows]

    def _packed(self, row: Row, features_of: FeaturesOf) -> MicroBatch:
        supervision = self.supervisor.supervise(row.segments, starts=row.offsets, num_tokens=row.num_tokens)
        images = [features_of(segment.sample) for segment in row.segments]
        inputs = make_model_inputs(row, images=images, model=self.model)
        indices = self.supervisor.logit_indices(supervision)
        kept = torch.tensor(indices, dtype=torch.int64, device=inputs["input_ids"].device)
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
        num_tokens, num_places = sum(segment.encoded_len for segment in segments), inputs["input_ids"].numel()
        starts = starts_of_padded(segments)
        return MicroBatch(
            inputs=inputs,
            supervision=self.supervisor.supervise(segments, starts=starts, num_tokens=num_places),
            segments=tuple(segments),
            num_tokens=num_tokens,
            fill=num_tokens / num_places,
            is_packed=False,
        )


def split_evenly(items: Sequence[Item], num_parts: int) -> list[Sequence[Item]]:
    """Contiguous parts whose sizes differ by at most one, larger ones first.

    >>> split_evenly([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    size, extra = divmod(len(items), num_parts)
    starts = [part * size + min(part, extra) for part in range(num_parts + 1)]
    return [items[start:end] for start, end in pairwise(starts)]
