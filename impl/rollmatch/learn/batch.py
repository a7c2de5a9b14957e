"""Segments -> the forward passes of one optimizer step: rows without padding, or padded batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from rollmatch.errors import LearnError
from rollmatch.learn.attention import pieces_of
from rollmatch.learn.balance import RowBalancer, split_by_length
from rollmatch.learn.pack import Packer, starts_of_padded
from rollmatch.model.images import NO_IMAGES, ImageFeatures, image_arguments, multimodal_part, token_types
from rollmatch.ranks import Ranks
from rollmatch.records import Row, Sample, Segment

VIDEO = 2
"""Type of a video's tokens."""


def make_model_inputs(row: Row, *, images: Sequence[ImageFeatures], model: torch.nn.Module) -> dict[str, Any]:
    """Arguments of one forward pass over a packed row of T tokens in S pieces, on the model's device.

    ``input_ids`` [1, T]; ``position_ids`` [4, 1, T] (without MRoPE [1, T]); ``cu_seq_lens_q/k`` [S + 1] int32, the
    bounds of what attends and of what is attended to, as ``attention`` reads them; token types [1, T] and the
    processor's tensors where there are images, of a shared prompt once. No attention mask: needs
    ``use_packed_attention`` (without shared prompts, FlashAttention will do) to keep the pieces apart at the sum of
    squares. Errors: ``images-not-aligned``, ``image-tokens-mismatch``, ``video-tokens``.
    """
    part, pieces = multimodal_part(model), row.pieces
    positions = [_positions(s, i, part) for s, i in _aligned(row.segments, images)]
    token_ids = torch.cat([_ids(row.segments[piece.segment])[piece.first : piece.end] for piece in pieces])[None]
    places = [positions[piece.segment][:, piece.first : piece.end] for piece in pieces]
    num_own, num_seen = [len(piece) for piece in pieces], [piece.num_before + len(piece) for piece in pieces]
    bounds = torch.tensor([0, *accumulate(num_own)]), torch.tensor([0, *accumulate(num_seen)])
    attended = pieces_of(bounds, num_tokens=token_ids.shape[1], device=next(model.parameters()).device)
    inputs = {
        "input_ids": token_ids,
        "position_ids": _as_argument(torch.cat(places, dim=1)[:, None]),
        "cu_seq_lens_q": attended.bounds[0],
        "cu_seq_lens_k": attended.bounds[1],
        "max_length_q": attended.longest[0],
        "max_length_k": attended.longest[1],
        "pieces": attended,
        "use_cache": False,
    }
    seen = [images[piece.segment] for piece in pieces if piece.first == 0]
    return _on_device_of(model, inputs | image_arguments(token_ids, seen, model))


def make_padded_inputs(
    segments: Sequence[Segment], *, images: Sequence[ImageFeatures], model: torch.nn.Module, pad_id: int
) -> dict[str, Any]:
    """Arguments of one forward pass over B segments, right-padded to the longest, [B, L], with their mask.

    The unpacked form; its supervision is that of its logits read as [B * L, V].
    Errors: as ``make_model_inputs``.
    """
    part = multimodal_part(model)
    positions = [_positions(s, i, part) for s, i in _aligned(segments, images)]
    longest = max(segment.encoded_len for segment in segments)

    def padded(rows: Tensor, fill: int) -> Tensor:
        return torch.nn.functional.pad(rows, (0, longest - rows.shape[-1]), value=fill)

    token_ids = torch.stack([padded(_ids(segment), pad_id) for segment in segments])
    inputs = {
        "input_ids": token_ids,
        "attention_mask": torch.stack([padded(torch.ones_like(_ids(segment)), 0) for segment in segments]),
        "position_ids": _as_argument(torch.stack([padded(rows, 0) for rows in positions], dim=1)),
        "use_cache": False,
    }
    return _on_device_of(model, inputs | image_arguments(token_ids, images, model))


def _aligned(segments: Sequence[Segment], images: Sequence[ImageFeatures]) -> list[tuple[Segment, ImageFeatures]]:
    if len(segments) != len(images):
        raise LearnError(
            f"{len(images)} entries of images for {len(segments)} segments",
            code="images-not-aligned",
            key="images",
            remedy="Give NO_IMAGES for a segment of text alone.",
        )
    return list(zip(segments, images, strict=True))


def _positions(segment: Segment, images: ImageFeatures, part: Any) -> Tensor:
    """[4, L] text, time, height, width where the model uses MRoPE; [1, L] where it does not."""
    text, token_ids = torch.arange(segment.encoded_len)[None], _ids(segment)[None]
    types = torch.zeros_like(token_ids) if part is None else token_types(token_ids, part.config)
    if bool((types == VIDEO).any()):
        raise LearnError(
            "a video placeholder",
            code="video-tokens",
            key=segment.sample.origin,
            remedy="Ban it from rollouts (logit_bias).",
        )
    modules = () if part is None else part.modules()
    rope = next((module for module in modules if hasattr(module, "get_rope_index")), None)
    _check_images(segment, types, images, in_runs=rope is not None)
    if rope is None:
        return text
    grid = images.tensors.get("image_grid_thw")
    mrope, _ = rope.get_rope_index(token_ids, mm_token_type_ids=types, image_grid_thw=grid)
    return torch.cat([text, mrope[:, 0]])


def _check_images(segment: Segment, types: Tensor, images: ImageFeatures, *, in_runs: bool) -> None:
    """Placeholders of a segment and of its images; ``in_runs``: each image is one run of them (MRoPE counts these)."""
    runs = [len(list(run)) for is_image, run in groupby(types[0].tolist()) if is_image]
    expected = list(images.num_placeholders)
    if (runs if in_runs else [sum(runs)]) != (expected if in_runs else [sum(expected)]):
        raise LearnError(
            f"image placeholders in runs of {runs}, images of {expected} tokens",
            code="image-tokens-mismatch",
            key=segment.sample.origin,
            remedy="Expand placeholders with the same processor, and ban them from rollouts (logit_bias).",
        )


def _ids(segment: Segment) -> Tensor:
    return torch.tensor(segment.token_ids, dtype=torch.int64)


def _as_argument(positions: Tensor) -> Tensor:
    """[4, B, L] as it is; [1, B, L] without MRoPE as [B, L]."""
    return positions[0] if positions.shape[0] == 1 else positions


def _on_device_of(model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    device = next(model.parameters()).device
    return {name: part.to(device) if isinstance(part, Tensor) else part for name, part in inputs.items()}


FeaturesOf = Callable[[Sample], ImageFeatures]


class Supervisor(Protocol):
    """What segments are to learn. The batcher only passes supervisions on."""

    def supervise(self, segments: Sequence[Segment], *, starts: Sequence[int], num_tokens: int) -> Any:
        """What a list of ``num_tokens`` tokens is to learn in which segment i starts at ``starts[i]``; segments may
        overlap in prompts that they share."""

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
    """Of the segments, each with its whole prompt."""
    num_shared: int = 0
    """Of those, prompts' that stand in the row once for several segments."""
    fill: float
    """Tokens per place: of the row's capacity, or of the padded rectangle."""
    is_packed: bool


Passes = dict[str, Sequence[MicroBatch]]
"""``passes`` of one batch of transformers: one, or all of an optimizer step. What ``training_step`` takes."""


class Batcher:
    """Makes the micro-batches of an optimizer step; holds the packing buffer between steps."""

    def __init__(  # noqa: PLR0913  # parts of one step
        self,
        model: torch.nn.Module,
        supervisor: Supervisor,
        *,
        packer: Packer | None,
        pad_id: int,
        balancer: RowBalancer | None = None,
        shares_prompts: bool = False,
        max_waiting: int | None = None,
        drops_last: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """``balancer``: without a packer, segments of a micro-batch are concatenated, not padded. ``shares_prompts``:
        neighbours of a row compute a prompt that they have alike once. ``max_waiting``: segments that the packer may
        keep for the next step, where ``num_batches`` rows do not take them; after the last step none wait, unless
        ``drops_last``."""
        self.max_waiting = max_waiting
        self.drops_last = drops_last
        self.ranks = ranks or Ranks()
        self.balancer = balancer
        self.shares_prompts = shares_prompts
        self.model = model
        self.supervisor = supervisor
        self.packer = packer
        self.pad_id = pad_id
        self.waiting_before: Sequence[Segment] = ()
        """Segments that waited for a row before the last ``make``."""
        self._num_batches = 1

    @property
    def tokens_per_batch(self) -> int | None:
        """Most tokens of a micro-batch, where their number follows from this; None where their number is fixed."""
        return None if self.balancer is None else self.balancer.capacity

    def as_inputs(self, batches: Sequence[MicroBatch]) -> list[Passes]:
        """What transformers iterates, ``num_batches`` or 1: each micro-batch, the last with all that are left."""
        if self.tokens_per_batch is not None:
            return [{"passes": batches}]
        single = self._num_batches - 1
        inputs: list[Passes] = [{"passes": [batch]} for batch in batches[:single]]
        return [*inputs, {"passes": batches[single:]}]

    def make(
        self, segments: Sequence[Segment], features_of: FeaturesOf, *, num_batches: int, is_last_step: bool = False
    ) -> list[MicroBatch]:
        """``num_batches`` micro-batches, or as many as the balancer finds, or more rows where segments would pile up.

        All ranks call it, and make as many. Errors: those of ``Packer.add``; the buffer is then unchanged.
        """
        self._num_batches = num_batches
        if self.packer is None and self.balancer is not None:
            rows = self.balancer.rows_of(segments, num_rows=num_batches, shares_prompts=self.shares_prompts)
            return [self._packed(row, features_of) if row.segments else self.idle(row.capacity) for row in rows]
        if self.packer is None:
            return [self._padded(part, features_of) for part in split_by_length(segments, num_batches)]
        self.waiting_before = self.packer.state()
        self.packer.add(segments)
        rows = [self.packer.pop_row(rows_to_follow=left) for left in reversed(range(num_batches))]
        max_waiting = 0 if is_last_step and not self.drops_last else self.max_waiting
        while max_waiting is not None and self.packer.buffered > max_waiting:
            rows.append(self.packer.pop_row())
        num_idle = max(self.ranks.gather(len(rows))) - len(rows)
        made = [self._packed(row, features_of) for row in rows]
        return made + [self.idle(self.packer.capacity) for _ in range(num_idle)]

    def idle(self, capacity: int) -> MicroBatch:
        """A pass of one token that nothing is learnt from: it takes part in what ranks exchange."""
        sample = Sample(sample_id=0, origin="no sample", images=())
        token = Segment(sample=sample, policy_version=0, token_ids=(self.pad_id,), prompt_len=1, prefix_len=0)
        row = Row(segments=(token,), capacity=capacity)
        return self._pass_of(row, [NO_IMAGES], learnt=(), fill=0.0)

    def _packed(self, row: Row, features_of: FeaturesOf) -> MicroBatch:
        images = [features_of(segment.sample) for segment in row.segments]
        shared = replace(row, shares_prompts=self.shares_prompts)
        return self._pass_of(shared, images, learnt=row.segments, fill=row.fill)

    def _pass_of(
        self, row: Row, images: Sequence[ImageFeatures], *, learnt: tuple[Segment, ...], fill: float
    ) -> MicroBatch:
        """``learnt``: all of the row's segments, or none."""
        starts = row.offsets[: len(learnt)]
        supervision = self.supervisor.supervise(learnt, starts=starts, num_tokens=row.num_tokens)
        inputs = make_model_inputs(row, images=images, model=self.model)
        indices = self.supervisor.logit_indices(supervision)
        kept = torch.tensor(indices, dtype=torch.int64, device=inputs["input_ids"].device)
        return MicroBatch(
            inputs=inputs | {"logits_to_keep": kept},
            supervision=supervision,
            segments=learnt,
            num_tokens=sum(row.lengths) if learnt else 0,
            num_shared=sum(row.lengths) - row.num_tokens,
            fill=fill,
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
