"""What is longer than its limit: refused, left out, or cut at the left. Needs no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from rollmatch.errors import LearnError
from rollmatch.records import PolicyTarget, Segment

T = TypeVar("T")
Overlong = Literal["error", "skip", "truncate_left"]


class SegmentTooLong(LearnError):
    """A segment is longer than ``global_max_length``; ``key`` is the sample's origin."""

    code = "segment-too-long"


def cut_left(
    token_ids: Sequence[int], num_excess: int, *, is_kept: Callable[[int], bool], image_id: int
) -> tuple[int, ...] | None:
    """Without the first ``num_excess`` tokens that may go; None where fewer may.

    Kept are chat framing and placeholders (``is_kept``), all between the first and the last image (models count images
    as separate runs of ``image_id``), and the last token.

    >>> cut_left((90, 1, 2, 91, 3, 4), 3, is_kept=lambda i: i >= 90, image_id=99)
    (90, 91, 4)
    >>> cut_left((90, 1, 99, 2, 99, 3, 4), 3, is_kept=lambda i: i >= 90, image_id=99) is None
    True
    """
    images = [place for place, token_id in enumerate(token_ids) if token_id == image_id]
    between = range(images[0], images[-1]) if images else range(0)
    places = [place for place, token_id in enumerate(token_ids[:-1]) if place not in between and not is_kept(token_id)]
    if len(places) < num_excess:
        return None
    removed = frozenset(places[:num_excess])
    return tuple(token_id for place, token_id in enumerate(token_ids) if place not in removed)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRules:
    """The longest segment, and what becomes of longer ones. Made by ``run.assemble``."""

    max_len: int
    """``global_max_length``, in tokens."""
    overlong: Overlong = "error"
    is_kept: Callable[[int], bool] = bool
    """As ``cut_left``."""
    image_id: int

    def fit(self, segment: Segment) -> Segment:
        """The segment, cut if need be; where that is not enough, a stub that teaches nothing.

        A target with log-probabilities is never cut: they belong to the whole prompt. Errors: ``SegmentTooLong``.
        """
        if segment.encoded_len <= self.max_len:
            return segment
        if self.overlong == "error" or segment.prompt_len >= self.max_len:
            raise too_long(segment, self.max_len)
        cut = self._cut(segment) if self.overlong == "truncate_left" and segment.policy is None else None
        return stub_of(segment) if cut is None else cut

    def _cut(self, segment: Segment) -> Segment | None:
        num_excess, prompt = segment.encoded_len - self.max_len, segment.token_ids[: segment.prompt_len]
        kept = cut_left(prompt, num_excess, is_kept=self.is_kept, image_id=self.image_id)
        if kept is None:
            return None
        return replace(
            segment,
            token_ids=(*kept, *segment.token_ids[segment.prompt_len :]),
            prompt_len=len(kept),
            coord_positions=tuple(position - num_excess for position in segment.coord_positions),
            desc_positions=tuple(position - num_excess for position in segment.desc_positions),
            corrected_positions=tuple(position - num_excess for position in segment.corrected_positions),
        )


def stub_of(segment: Segment) -> Segment:
    """Prompt and first target token, without supervision: it keeps the places of rows and ranks."""
    target = segment.policy
    return replace(
        segment,
        token_ids=segment.token_ids[: segment.prompt_len + 1],
        prefix_len=1,
        coord_positions=(),
        coord_bins=(),
        desc_positions=(),
        corrected_positions=(),
        corrected_labels=(),
        policy=None if target is None else _masked(target),
    )


def too_long(segment: Segment, max_len: int) -> SegmentTooLong:
    """The error for a segment."""
    return SegmentTooLong(
        f"a segment of {segment.encoded_len} tokens does not fit a row of {max_len}",
        key=segment.sample.origin,
        remedy="Raise global_max_length, lower max_new_tokens, or set overlong to skip or truncate_left.",
    )


def _masked(target: PolicyTarget) -> PolicyTarget:
    def first(values: tuple[T, ...] | None) -> tuple[T, ...] | None:
        return None if values is None else values[:1]

    return PolicyTarget(
        advantages=(0.0,),
        old_logprobs=first(target.old_logprobs),
        sampler_logprobs=first(target.sampler_logprobs),
        reference_logprobs=first(target.reference_logprobs),
        teacher_logprobs=first(target.teacher_logprobs),
        teacher_top=first(target.teacher_top),
        is_masked=True,
        is_written=None if target.is_written is None else (True,),
    )
