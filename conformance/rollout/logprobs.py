"""What a learner finds of responses whose log-probabilities an engine told."""

from conformance.rollout.digits import template_of
from rollmatch.learn.score import score_segments
from rollmatch.records import PolicyTarget, Segment
from rollmatch.target.grpo import policy_segment, sampled_logprobs

TOLERANCE = 1e-3
"""Banned tokens have a share in the learner's distribution that they have not in the engine's."""


def segments_of(requests, rollouts) -> list[Segment]:
    stop_id = template_of().vocabulary.stop_id
    return [
        policy_segment(request.sample, rollout, PolicyTarget(advantages=()), stop_id=stop_id)
        for request, rollout in zip(requests, rollouts, strict=True)
    ]


def farthest_apart(model, requests, rollouts, *, temperature: float) -> float:
    """The largest difference between what the engine told of a token and what the learner finds."""
    template, segments = template_of(), segments_of(requests, rollouts)
    found = score_segments(model, segments, template.image_features, temperature=temperature, batch_size=8)
    stop_id = template.vocabulary.stop_id
    told = [
        sampled_logprobs(request.sample, rollout, stop_id=stop_id)
        for request, rollout in zip(requests, rollouts, strict=True)
    ]
    return max(abs(a - b) for row, other in zip(found, told, strict=True) for a, b in zip(row, other, strict=True))
