"""Log-probabilities of segments' target tokens by a forward pass without gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rollmatch.learn.balance import PassSize, costs_of
from rollmatch.learn.batch import make_model_inputs, make_padded_inputs
from rollmatch.learn.head import Logits, Score, Scoring, logprobs_of, logprobs_with_top, to_device
from rollmatch.model.images import ImageFeatures
from rollmatch.model.policy import head_worth_avoiding, without_adapters
from rollmatch.model.sharding import is_sharded, run_idle
from rollmatch.ranks import Ranks
from rollmatch.records import Row, Sample, Segment, Teaching

LogprobsOf = Callable[[Logits, Tensor], Tensor]
"""([n, V] logits, [n] ids) -> [n] log-probabilities, or [n, ...] of several."""
CHUNK_LEN = 2048
"""Target tokens whose logits exist at once in float32."""


@torch.no_grad()
def score_segments(
    model: nn.Module,
    segments: Sequence[Segment],
    features_of: Callable[[Sample], ImageFeatures],
    *,
    logprobs: LogprobsOf,
    size: PassSize,
) -> list[tuple[Any, ...]]:
    """[L - P] log-probabilities of each segment's target, in order; the model as in evaluation, its mode kept.

    ``logprobs`` is ``logprobs_of`` with the temperature and the excluded ids of the rollouts: numbers; of a function
    that makes more of each token, lists.
    """
    training, scored = model.training, dict[int, tuple[Any, ...]]()
    model.eval()
    try:
        for chosen in size.split(costs_of(segments, shares_prompts=size.shares_prompts)):
            batch = tuple(segments[index] for index in chosen)
            if size.is_packed:
                row = Row(segments=batch, capacity=0, shares_prompts=size.shares_prompts)
                scores = _score_row(model, row, features_of, logprobs)
            else:
                scores = _score_batch(model, batch, features_of, logprobs)
            scored |= dict(zip(chosen, scores, strict=True))
    finally:
        model.train(training)
    return [scored[index] for index in range(len(segments))]


@torch.no_grad()
def score_without_adapters(model: nn.Module, inputs: dict[str, object], score: Score, scoring: Scoring) -> Tensor:
    """What ``score`` makes of the logits of a pass without adapters and dropout. Errors: ``reference-missing``."""
    training = model.training
    model.eval()
    try:
        with without_adapters(model, wanted=True):
            scores, _ = scoring(model, inputs, score)
    finally:
        model.train(training)
    return scores


def _score_row(
    model: nn.Module,
    row: Row,
    features_of: Callable[[Sample], ImageFeatures],
    logprobs: LogprobsOf,
) -> list[tuple[Any, ...]]:
    segments = row.segments
    inputs = make_model_inputs(row, images=[features_of(segment.sample) for segment in segments], model=model)
    device, lens = inputs["input_ids"].device, [segment.train_len for segment in segments]
    firsts = [start + segment.prompt_len - 1 for segment, start in zip(segments, row.offsets, strict=True)]
    kept = to_device(chain(*map(_count_from, firsts, lens)), dtype=torch.int64, device=device)
    ids = to_device(chain(*(s.token_ids[s.prompt_len :] for s in segments)), dtype=torch.int64, device=device)

    def score(logits: Logits) -> Tensor:
        rows = kept if len(logits) == row.num_tokens else torch.arange(len(kept), device=device)  # as below: all
        return _in_chunks(logprobs, logits, rows, ids)

    scores, _ = Scoring(head_worth_avoiding(model))(model, inputs | {"logits_to_keep": kept}, score)
    return [tuple(part.tolist()) for part in torch.split(scores, lens)]


def _in_chunks(logprobs: LogprobsOf, logits: Logits, rows: Tensor, ids: Tensor) -> Tensor:
    parts = zip(torch.split(rows, CHUNK_LEN), torch.split(ids, CHUNK_LEN), strict=True)
    return torch.cat([logprobs(logits[some], of) for some, of in parts])


def _score_batch(
    model: nn.Module,
    batch: Sequence[Segment],
    features_of: Callable[[Sample], ImageFeatures],
    logprobs: LogprobsOf,
) -> list[tuple[Any, ...]]:
    images = [features_of(segment.sample) for segment in batch]
    inputs = make_padded_inputs(batch, images=images, model=model, pad_id=0)
    longest, earliest = inputs["input_ids"].shape[1], min(segment.prompt_len for segment in batch) - 1
    lens = [segment.train_len for segment in batch]
    device = inputs["input_ids"].device
    ids = to_device(chain(*(s.token_ids[s.prompt_len :] for s in batch)), dtype=torch.int64, device=device)

    def score(logits: Logits) -> Tensor:
        num_kept = len(logits) // len(batch)  # all, where a model takes no logits_to_keep (Qwen-Omni)
        firsts = [(place + 1) * num_kept - longest + segment.prompt_len - 1 for place, segment in enumerate(batch)]
        rows = to_device(chain(*map(_count_from, firsts, lens)), dtype=torch.int64, device=device)
        return _in_chunks(logprobs, logits, rows, ids)

    scoring = Scoring(head_worth_avoiding(model))
    scores, _ = scoring(model, inputs | {"logits_to_keep": longest - earliest}, score)
    return [tuple(part.tolist()) for part in torch.split(scores, lens)]


def _count_from(first: int, num: int) -> range:
    return range(first, first + num)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentScorer:
    """Log-probabilities by the policy as it is, or as it was before training."""

    model: nn.Module
    reference: nn.Module | None
    """The policy before training; None: the policy without its adapters."""
    features_of: Callable[[Sample], ImageFeatures]
    temperature: float
    """Of the rollouts."""
    excluded_ids: Sequence[int]
    """Ids that rollouts may not contain."""
    size: PassSize
    check_images: Callable[[Sequence[bool]], None]
    """Takes whether each pass has images, on all ranks at once. Errors: where ranks cannot run them together."""
    ranks: Ranks = field(default_factory=Ranks)

    def __call__(self, segments: Sequence[Segment], *, reference: bool = False) -> list[tuple[float, ...]]:
        """As ``score_segments``. Called by all ranks, which run as many passes where they share the weights."""
        kept = self.reference if reference else None
        score = partial(logprobs_of, **self._sampling)
        with without_adapters(self.model, wanted=reference and kept is None):
            return self._run(self.model if kept is None else kept, segments, score)

    def teach(self, segments: Sequence[Segment], *, model: nn.Module | None, top_k: int) -> list[Teaching]:
        """The same by another model (None: the policy), with its ``top_k`` likeliest ids at each place."""
        score = partial(logprobs_with_top, top_k=top_k, **self._sampling)
        found = self._run(self.model if model is None else model, segments, score)
        return [_teaching_of(rows, top_k) for rows in found]

    @property
    def _sampling(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "excluded_ids": self.excluded_ids}

    def _run(self, model: nn.Module, segments: Sequence[Segment], score: LogprobsOf) -> list[Any]:
        size = self.size.fitting(max((segment.encoded_len for segment in segments), default=0))
        num_idle = self._count_idle(segments, size) if is_sharded(model) else 0
        scores = score_segments(model, segments, self.features_of, logprobs=score, size=size)
        for _ in range(num_idle):
            run_idle(model)
        return scores

    def _count_idle(self, segments: Sequence[Segment], size: PassSize) -> int:
        """Passes that other ranks run more than this one. Errors: those of ``check_images``."""
        passes = size.split(costs_of(segments, shares_prompts=size.shares_prompts))
        self.check_images([any(segments[index].sample.images for index in chosen) for chosen in passes])
        return max(self.ranks.gather(len(passes))) - len(passes)


def _teaching_of(rows: Sequence[Sequence[float]], top_k: int) -> Teaching:
    """Of rows as ``logprobs_with_top`` writes them."""
    tops = (zip(map(int, row[1 : 1 + top_k]), row[1 + top_k :], strict=True) for row in rows)
    return Teaching(logprobs=tuple(row[0] for row in rows), top=tuple(map(tuple, tops)))
