"""What a learner finds of responses whose log-probabilities an engine reported."""

import dataclasses
from functools import partial
from itertools import accumulate, chain

import torch

from conformance.doubles.digits import template_of
from rollmatch.learn.balance import PassSize
from rollmatch.learn.head import logprobs_of
from rollmatch.learn.score import score_segments
from rollmatch.objectives.grpo.loss import PolicyRules, count_policy_totals, score_tokens, supervise_policy
from rollmatch.objectives.grpo.segments import policy_segment, sampled_logprobs
from rollmatch.records import PolicyTarget, Segment

TOLERANCE = 1e-3
"""Nats, in float32: engine and learner take the same distribution over the same ids."""


def segments_of(requests, rollouts) -> list[Segment]:
    return [
        policy_segment(request.sample, rollout, PolicyTarget(advantages=()))
        for request, rollout in zip(requests, rollouts, strict=True)
    ]


def reported_of(requests, rollouts) -> list[tuple[float, ...]]:
    """The engine's, of every target token."""
    return [sampled_logprobs(request.sample, rollout) for request, rollout in zip(requests, rollouts, strict=True)]


def found_in(model, requests, rollouts, *, temperature: float) -> list[tuple[float, ...]]:
    """The learner's, of the same tokens."""
    template, segments = template_of(), segments_of(requests, rollouts)
    logprobs = partial(logprobs_of, temperature=temperature, excluded_ids=template.banned_ids)
    return score_segments(model, segments, template.image_features, logprobs=logprobs, size=PassSize(segments=8))


def farthest_apart(model, requests, rollouts, *, temperature: float) -> float:
    """The largest difference between what the engine reports of a token and what the learner finds."""
    found, reported = found_in(model, requests, rollouts, temperature=temperature), reported_of(requests, rollouts)
    return max(abs(a - b) for row, other in zip(found, reported, strict=True) for a, b in zip(row, other, strict=True))


def figures_of(model, requests, rollouts, *, temperature: float) -> dict[str, float]:
    """What a step would log that learns from these rollouts before anything has changed."""
    found, reported = found_in(model, requests, rollouts, temperature=temperature), reported_of(requests, rollouts)
    targets = [
        PolicyTarget(advantages=(1.0,) * len(row), old_logprobs=row, sampler_logprobs=other)
        for row, other in zip(found, reported, strict=True)
    ]
    segments = [
        dataclasses.replace(segment, policy=target)
        for segment, target in zip(segments_of(requests, rollouts), targets, strict=True)
    ]
    ends = list(accumulate(segment.encoded_len for segment in segments))
    supervision = supervise_policy(segments, starts=[0, *ends[:-1]], num_tokens=ends[-1])
    totals = count_policy_totals([supervision], list)
    rules = PolicyRules(max_new_tokens=8, temperature=temperature)
    return score_tokens(torch.tensor(list(chain(*found))), supervision=supervision, rules=rules, totals=totals).figures
