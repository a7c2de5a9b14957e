"""Log-probabilities of segments' target tokens by a forward pass without gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn

from rollmatch.learn.balance import PassSize
from rollmatch.learn.batch import make_model_inputs, make_padded_inputs
from rollmatch.learn.head import Logits, Score, Scoring, to_device
from rollmatch.model.images import ImageFeatures
from rollmatch.model.policy import head_worth_avoiding, without_adapters
from rollmatch.model.sharding import is_sharded, run_idle
from rollmatch.ranks import Ranks
from rollmatch.records import Row, Sample, Segment

LogprobsOf = Callable[[Logits, Tensor], Tensor]
"""([n, V] logits, [n] ids) -> [n] log-probabilities."""
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
) -> list[tuple[float, ...]]:
    """[L - P] log-probabilities of each segment's target, in order; the model as in evaluation, its mode kept.

    ``logprobs`` is ``logprobs_of`` with the temperature and the excluded ids of the rollouts.
    """
    training, scored = model.training, dict[int, tuple[float, ...]]()
    score = _score_batch if size.tokens is None else _score_row
    model.eval()
    try:
        for chosen in size.split([segment.encoded_len for segment in segments]):
            batch = [segments[index] for index in chosen]
            scored |= dict(zip(chosen, score(model, batch, features_of, logprobs), strict=True))
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
    segments: Sequence[Segment],
    features_of: Callable[[Sample], ImageFeatures],
    logprobs: LogprobsOf,
) -> list[tuple[float, ...]]:
    row = Row(segments=tuple(segments), capacity=0)
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
) -> list[tuple[float, ...]]:
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
    logprobs: LogprobsOf
    size: PassSize
    check_images: Callable[[Sequence[bool]], None]
    """Takes whether each pass has images, on all ranks at once. Errors: where ranks cannot run them together."""
    ranks: Ranks = field(default_factory=Ranks)

    def __call__(self, segments: Sequence[Segment], *, reference: bool = False) -> list[tuple[float, ...]]:
        """As ``score_segments``. Called by all ranks, which run as many passes where they share the weights."""
        kept = self.reference if reference else None
        model = self.model if kept is None else kept
        num_idle = self._count_idle(segments) if is_sharded(model) else 0
        with without_adapters(self.model, wanted=reference and kept is None):
            scores = score_segments(model, segments, self.features_of, logprobs=self.logprobs, size=self.size)
            for _ in range(num_idle):
                run_idle(model)
        return scores

    def _count_idle(self, segments: Sequence[Segment]) -> int:
        """Passes that other ranks run more than this one. Errors: those of ``check_images``."""
        passes = self.size.split([segment.encoded_len for segment in segments])
        self.check_images([any(segments[index].sample.images for index in chosen) for chosen in passes])
        return max(self.ranks.gather(len(passes))) - len(passes)
