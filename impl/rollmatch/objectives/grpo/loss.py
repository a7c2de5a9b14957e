"""The clipped policy gradient: PPO's ratio, a distance to the reference, a correction for the engine's own rounding.

For one token with log-probability ``l`` under the policy, ``old``, ``ref`` and ``sampled`` those of ``PolicyTarget``,
and advantage ``A``::

    ratio  = exp(l - old)
    gain   = min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A)
    weight = bounded(exp(old - sampled), low, high)
    kl     = exp(ref - l) - (ref - l) - 1
    loss   = -gain * weight  +  beta * kl

    total = sum of coefficient * loss / divisor

=========================  ==================================================================================
option                     what it changes; a mean or sum is over the segment's tokens that are learnt from
=========================  ==================================================================================
``importance: sequence``   ratio = exp(mean of l - old), the same for all tokens of a segment
``clip: cispo``            gain = min(ratio, 1 + epsilon_high) * A * l; its first factor has no gradient
``level: sequence``        weight from exp(sum of old - sampled)
``level: geometric``       weight from exp(mean of old - sampled)
``mode: truncate``         bounded: clip(ratio, low, high)
``mode: mask``             bounded: 0 outside low and high; inside the ratio, and 1 with ``level: geometric``
``top_entropy_share``      gain = 0 for tokens of the micro-batch whose entropy is below its (1 - share) quantile
``entropy_coef``           total - entropy_coef * mean entropy of the tokens that have a gain
=========================  ==================================================================================

=============  ==========================  ================================================
``normalize``  coefficient                 divisor, over all rows and ranks of the step
=============  ==========================  ================================================
``token``      1                           target tokens of all segments, masked ones included
``sequence``   1 / tokens of the segment   segments, masked ones included
``constant``   1                           segments, masked ones included, * ``max_new_tokens``
=============  ==========================  ================================================

All log-probabilities are of softmax(logits / temperature) over the ids that rollouts may contain. Every term is a sum,
so micro-batches and ranks add up to what one big batch would give; a segment is never split. Sources: PPO (arXiv
1707.06347), GRPO (2402.03300), Dr. GRPO (2503.20783), DAPO (2503.14476) for token normalisation, k3 (Schulman 2020),
truncated importance sampling (Yao et al. 2025), GSPO (2507.18071), CISPO (2506.13585), masked importance sampling by
TRL 1.10, geometric rejection by verl 0.6.1 (``rollout_rs: geometric``), tokens of high entropy (2506.01939).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal

import torch
from torch import Tensor

from rollmatch.errors import LearnError
from rollmatch.learn.head import Logits, log_distribution, logprobs_of, row_scores, to_device
from rollmatch.records import PolicyTarget, Segment, TopLogprobs

Normalize = Literal["token", "sequence", "constant"]
TERM_NAMES = ("loss_policy", "kl", "clip_share", "ratio_mean", "drift", "correction_mean", "entropy")
"""Figures of a step: means over the tokens learnt from, but for the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Weight of a token for the difference between learner and engine; fields as in ``CorrectionConfig``."""

    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    low: float | None = None
    high: float = 2.0

    def weights(self, difference: Tensor, lens: Sequence[int]) -> Tensor:
        """[K] from the log-probabilities by the learner minus those by the engine, [K], of segments with ``lens``.

        >>> drift = torch.tensor([0.5, 0.5, 1.0]).log()
        >>> Correction(level="sequence", high=0.8).weights(drift, [2, 1])
        tensor([0.2500, 0.2500, 0.8000])
        >>> Correction(level="geometric", mode="mask", low=0.8).weights(drift, [2, 1])
        tensor([0., 0., 1.])
        """
        if self.level != "token":
            difference = over_segments(difference, lens, torch.sum if self.level == "sequence" else torch.mean)
        ratio = torch.exp(difference)
        if self.mode == "truncate":
            return ratio.clamp(min=self.low, max=self.high)
        is_outside = (ratio > self.high) | (ratio < (self.low or 0.0))
        return (torch.ones_like(ratio) if self.level == "geometric" else ratio).masked_fill(is_outside, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRules:
    """The objective's knobs; their ranges are the config's to hold."""

    importance: Literal["token", "sequence"] = "token"
    """Ratios of tokens, or of whole segments (GSPO)."""
    clip: Literal["ppo", "cispo"] = "ppo"
    """What is clipped: the gain, or its weight alone."""
    epsilon: float = 0.2
    epsilon_high: float | None = None
    """Upper side of the clip; None: as ``epsilon``."""
    ratio_cap: float | None = None
    """Largest ratio where it makes a loss grow (two-sided clipping); None: none."""
    beta: float = 0.0
    correction: Correction | None = Correction()
    """Weight for the difference to the engine; None: 1."""
    normalize: Normalize = "token"
    entropy_coef: float = 0.0
    """Weight of the mean entropy, which is taken off the loss."""
    top_entropy_share: float = 1.0
    """Share of a micro-batch's tokens, those of the highest entropy, that have a policy gradient."""
    max_new_tokens: int
    temperature: float
    excluded_ids: tuple[int, ...] = ()
    """Ids that rollouts may not contain; the policy's distribution is over all others."""

    @property
    def looks_at_entropy(self) -> bool:
        """Whether whole distributions are wanted, and not the sampled tokens' probabilities alone."""
        return self.entropy_coef != 0 or self.top_entropy_share < 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySupervision:
    """What a list of tokens learns by a policy gradient; lists of [K], one entry per token that is learnt from."""

    positions: tuple[int, ...]
    """Index of the token; its logit stands one place earlier."""
    token_ids: tuple[int, ...]
    segments: tuple[int, ...]
    """Which of the segments it belongs to."""
    segment_lens: tuple[int, ...]
    """[S] tokens that are learnt from, of every segment; 0 of a masked one."""
    advantages: tuple[float, ...]
    old_logprobs: tuple[float | None, ...]
    sampler_logprobs: tuple[float | None, ...]
    reference_logprobs: tuple[float | None, ...] | Tensor
    teacher_logprobs: tuple[float | None, ...]
    teacher_top: tuple[TopLogprobs | None, ...]
    teacher_weights: tuple[float, ...]
    num_target_tokens: int
    """Of all segments, masked ones included."""
    num_places: int
    """Tokens of the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTotals:
    """What an optimizer step learns from, over all its rows and ranks."""

    num_tokens: int
    """Learnt from."""
    num_target_tokens: int
    """With those of masked segments."""
    num_segments: int
    """With masked ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """One micro-batch's share of the step's loss; only ``total`` has a graph."""

    total: Tensor
    figures: dict[str, float]


def supervise_policy(segments: Sequence[Segment], *, starts: Sequence[int], num_tokens: int) -> PolicySupervision:
    """Every target token that the policy wrote, of every segment that is not masked. Errors: ``policy-target-misfit``.

    >>> from rollmatch.records import Sample
    >>> sample, policy = Sample(sample_id=0, origin="x:1", images=()), PolicyTarget(advantages=(0.5, 0.5))
    >>> one = Segment(sample=sample, policy_version=1, token_ids=(7, 8, 9), prompt_len=1, prefix_len=2, policy=policy)
    >>> supervision = supervise_policy([one, one], starts=[0, 3], num_tokens=6)
    >>> supervision.positions, supervision.token_ids, supervision.segments
    ((1, 2, 4, 5), (8, 9, 8, 9), (0, 0, 1, 1))
    """
    rows: list[tuple[Any, ...]] = []
    lens = []
    for index, (segment, start) in enumerate(zip(segments, starts)):
        policy = _checked(segment)
        lens.append(0 if policy.is_masked else num_written(segment))
        if policy.is_masked:
            continue
        places = range(start + segment.prompt_len, start + segment.encoded_len)
        recorded = (
            policy.old_logprobs,
            policy.sampler_logprobs,
            policy.reference_logprobs,
            policy.teacher_logprobs,
            policy.teacher_top,
        )
        columns = [column or (None,) * segment.train_len for column in recorded]
        ids = segment.token_ids[segment.prompt_len :]
        whole = zip(places, ids, [index] * len(ids), policy.advantages, *columns, [policy.teacher_weight] * len(ids))
        rows += whole if policy.is_written is None else compress(whole, policy.is_written)
    positions, token_ids, owners, advantages, old, sampler, reference, *taught = list(zip(*rows)) or [()] * 10
    teacher, top, weights = taught
    return PolicySupervision(
        positions=positions,
        token_ids=token_ids,
        segments=owners,
        advantages=advantages,
        old_logprobs=old,
        sampler_logprobs=sampler,
        reference_logprobs=reference,
        teacher_logprobs=teacher,
        teacher_top=top,
        teacher_weights=weights,
        segment_lens=tuple(lens),
        num_target_tokens=sum(map(num_written, segments)),
        num_places=num_tokens,
    )


def num_written(segment: Segment) -> int:
    """Target tokens that the policy wrote."""
    mask = segment.policy.is_written if segment.policy else None
    return segment.train_len if mask is None else sum(mask)


def policy_logit_indices(supervision: PolicySupervision) -> tuple[int, ...]:
    """Where the logits of its tokens stand: what to give a model as ``logits_to_keep``."""
    return tuple(position - 1 for position in supervision.positions)


def count_policy_totals(
    supervisions: Iterable[PolicySupervision], sum_over_ranks: Callable[[Sequence[float]], list[float]]
) -> PolicyTotals:
    """Of all rows and all ranks."""
    rows = list(supervisions)
    counts = [(len(row.positions), row.num_target_tokens, len(row.segment_lens)) for row in rows]
    mine = [float(sum(column)) for column in zip(*counts)] or [0.0] * 3
    tokens, target_tokens, segments = (round(number) for number in sum_over_ranks(mine))
    return PolicyTotals(num_tokens=tokens, num_target_tokens=target_tokens, num_segments=segments)


def policy_logprobs(logits: Logits, *, supervision: PolicySupervision, rules: PolicyRules, is_kept: bool) -> Tensor:
    """[K] log-probabilities of the supervision's tokens; logits and errors as in ``policy_loss``."""
    logits = supervised_rows(logits, supervision, is_kept=is_kept)
    ids = to_device(supervision.token_ids, dtype=torch.int64, device=logits.device)
    return logprobs_of(logits, ids, temperature=rules.temperature, excluded_ids=rules.excluded_ids)


def supervised_rows(logits: Logits, supervision: PolicySupervision, *, is_kept: bool) -> Logits:
    """[K, V] logits at ``policy_logit_indices``; logits and errors as in ``policy_loss``."""
    expected = len(supervision.positions) if is_kept else supervision.num_places
    if len(logits) != expected:
        raise LearnError(
            f"{len(logits)} rows of logits for {expected} tokens", code="policy-logits-misfit", key="logits"
        )
    if is_kept:
        return logits
    return logits[to_device(policy_logit_indices(supervision), dtype=torch.int64, device=logits.device)]


def policy_loss(
    logits: Logits, *, supervision: PolicySupervision, rules: PolicyRules, totals: PolicyTotals, is_kept: bool
) -> PolicyTerms:
    """Score logits, or what stands for them: [K, V] at ``policy_logit_indices`` where ``is_kept``, else [T, V] of all.

    Errors: ``policy-logits-misfit``.
    """
    if not rules.looks_at_entropy:
        logprobs = policy_logprobs(logits, supervision=supervision, rules=rules, is_kept=is_kept)
        return score_tokens(logprobs, supervision=supervision, rules=rules, totals=totals)
    ids = to_device(supervision.token_ids, dtype=torch.int64, device=logits.device)

    def of_rows(rows: Tensor, some: Tensor) -> tuple[Tensor, Tensor]:
        scores = log_distribution(rows, temperature=rules.temperature, excluded_ids=rules.excluded_ids)
        known = scores.masked_fill(scores == -torch.inf, 0.0)  # 0 * log 0 is 0
        return scores.gather(-1, some[:, None])[:, 0], -(scores.exp() * known).sum(-1)

    logprobs, entropies = row_scores(supervised_rows(logits, supervision, is_kept=is_kept), of_rows, ids)
    return score_tokens(logprobs, supervision=supervision, rules=rules, totals=totals, entropies=entropies)


def score_tokens(  # noqa: PLR0913  # what teachers add is named
    logprobs: Tensor,
    *,
    supervision: PolicySupervision,
    rules: PolicyRules,
    totals: PolicyTotals,
    teaching: Callable[[Tensor], Tensor] | None = None,
    divergences: Tensor | None = None,
    entropies: Tensor | None = None,
) -> PolicyTerms:
    """[K] log-probabilities of the supervision's tokens -> the share of the loss.

    ``teaching``: [K] log-probabilities that the ratio starts from -> [K] what is added to the advantages;
    ``divergences``: [K] what is added to the losses; ``entropies``: [K] of the policy's distributions, where rules want
    them.
    """
    now = logprobs.detach()
    advantages = to_device(supervision.advantages, dtype=torch.float32, device=now.device)
    old = column_of(supervision.old_logprobs, otherwise=now)
    if teaching is not None:
        advantages = advantages + teaching(old)
    log_ratio, lens = logprobs - old, supervision.segment_lens
    ratio = torch.exp(log_ratio if rules.importance == "token" else over_segments(log_ratio, lens, torch.mean))
    gains, is_clipped = _gains(ratio, logprobs, advantages, rules)
    losses, has_gain = -gains, torch.ones_like(now)
    if entropies is not None and len(now):
        has_gain = (entropies >= torch.quantile(entropies.detach(), 1 - rules.top_entropy_share)).to(now.dtype)
        losses = losses * has_gain
    difference = old - column_of(supervision.sampler_logprobs, otherwise=old)
    correction = torch.ones_like(old)
    if rules.correction is not None:
        correction = rules.correction.weights(difference, lens)
    losses = losses * correction
    toward = column_of(supervision.reference_logprobs, otherwise=now) - logprobs
    kl = torch.exp(toward) - toward - 1
    if rules.beta:
        losses = losses + rules.beta * kl
    if divergences is not None:
        losses = losses + divergences
    total = (losses * _coefficients(supervision, rules, losses)).sum() / _divisor(rules, totals)
    if entropies is not None and len(now):  # the mean of each micro-batch, by its share of the step's tokens
        mean = (entropies * has_gain).sum() / has_gain.sum()
        total = total - rules.entropy_coef * mean * len(now) / (totals.num_tokens or 1)
    columns = (kl, is_clipped, ratio, difference.abs(), correction, -now if entropies is None else entropies)
    num_tokens = totals.num_tokens or 1
    sums = [column.detach().float().sum() for column in columns]
    loss, *figures = torch.stack([total.detach(), *sums]).tolist()  # at once: each look waits for the device
    means = [value / num_tokens for value in figures]
    return PolicyTerms(total=total, figures=dict(zip(TERM_NAMES, [loss, *means])))


def over_segments(values: Tensor, lens: Sequence[int], reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """[K] values reduced over each segment, at each of its tokens; segments of 0 tokens have none.

    >>> over_segments(torch.tensor([1.0, 3.0, 5.0]), [2, 0, 1], torch.mean)
    tensor([2., 2., 5.])
    """
    return (
        torch.cat([reduce(part).expand_as(part) for part in torch.split(values, list(lens))]) if len(values) else values
    )


def _gains(ratio: Tensor, logprobs: Tensor, advantages: Tensor, rules: PolicyRules) -> tuple[Tensor, Tensor]:
    """[K] what the loss is the negative of; [K] which tokens are clipped."""
    low, high = 1 - rules.epsilon, 1 + (rules.epsilon if rules.epsilon_high is None else rules.epsilon_high)
    if rules.clip == "cispo":
        return ratio.detach().clamp(max=high) * advantages * logprobs, ratio > high
    bounded = ratio if rules.ratio_cap is None else ratio.clamp(max=rules.ratio_cap)
    gains = torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
    return gains, ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))


def _coefficients(supervision: PolicySupervision, rules: PolicyRules, like: Tensor) -> Tensor:
    if rules.normalize != "sequence":
        return torch.ones_like(like)
    shares = (1.0 / supervision.segment_lens[index] for index in supervision.segments)
    return to_device(shares, dtype=torch.float32, device=like.device)


def _divisor(rules: PolicyRules, totals: PolicyTotals) -> int:
    """Totals of zero mean sums of zero: any divisor will do."""
    if rules.normalize == "token":
        return totals.num_target_tokens or 1
    return (totals.num_segments or 1) * (rules.max_new_tokens if rules.normalize == "constant" else 1)


def column_of(values: Sequence[float | None] | Tensor, *, otherwise: Tensor) -> Tensor:
    """[K] as recorded; where nothing is, the other column's value."""
    if isinstance(values, Tensor):
        return values
    if all(value is None for value in values):
        return otherwise
    known = to_device((value or 0.0 for value in values), dtype=torch.float32, device=otherwise.device)
    is_known = to_device((value is not None for value in values), dtype=torch.bool, device=otherwise.device)
    return torch.where(is_known, known, otherwise)


def _checked(segment: Segment) -> PolicyTarget:
    policy, origin = segment.policy, segment.sample.origin
    if policy is None or segment.prompt_len < 1:
        raise LearnError("a segment without policy target, or without prompt", code="policy-target-misfit", key=origin)
    columns = (policy.advantages, policy.old_logprobs, policy.sampler_logprobs, policy.reference_logprobs)
    for column in (*columns, policy.is_written, policy.teacher_logprobs, policy.teacher_top):
        if column is not None and len(column) != segment.train_len:
            raise LearnError(
                f"{len(column)} numbers for {segment.train_len} target tokens", code="policy-target-misfit", key=origin
            )
    return policy
