"""Log-probabilities of segments' target tokens by a forward pass without gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from rollmatch.learn.collate import make_padded_inputs
from rollmatch.learn.head import logprobs_of
from rollmatch.records import Sample, Segment
from rollmatch.template import ImageFeatures

CHUNK_LEN = 2048
"""Target tokens whose logits exist at once in float32."""


@torch.no_grad()
def score_segments(
    model: nn.Module,
    segments: Sequence[Segment],
    features_of: Callable[[Sample], ImageFeatures],
    *,
    temperature: float,
    batch_size: int,
) -> list[tuple[float, ...]]:
    """[L - P] log-probabilities of each segment's target, in order; the model as in evaluation, its mode kept."""
    training, scored = model.training, dict[int, tuple[float, ...]]()
    order = sorted(range(len(segments)), key=lambda index: segments[index].encoded_len)
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = [segments[index] for index in chosen]
            scored |= dict(zip(chosen, _score_batch(model, batch, features_of, temperature), strict=True))
    finally:
        model.train(training)
    return [scored[index] for index in range(len(segments))]


def _score_batch(
    model: nn.Module, batch: Sequence[Segment], features_of: Callable[[Sample], ImageFeatures], temperature: float
) -> list[tuple[float, ...]]:
    images = [features_of(segment.sample) for segment in batch]
    inputs = make_padded_inputs(batch, images=images, model=model, pad_id=0)
    earliest = min(segment.prompt_len for segment in batch) - 1
    logits = model(**inputs, logits_to_keep=inputs["input_ids"].shape[1] - earliest).logits
    rows = []
    for row, segment in zip(logits, batch, strict=True):
        target = torch.tensor(segment.token_ids[segment.prompt_len :], device=row.device)
        first = segment.prompt_len - 1 - earliest
        kept = row[first : first + len(target)]
        parts = zip(torch.split(kept, CHUNK_LEN), torch.split(target, CHUNK_LEN), strict=True)
        rows.append(tuple(torch.cat([logprobs_of(*part, temperature=temperature) for part in parts]).tolist()))
    return rows
