"""What a teacher adds to the policy gradient of ``grpo.loss``.

For one token with log-probability ``l`` under the policy, ``old`` as there and ``t`` under the teacher, of a teacher
with weight ``w``::

    loss: sampled       A    = A + w * (t - old)
    loss: divergence    loss = loss + w * D(teacher, policy)

``sampled`` follows the gradient of the reverse KL(policy, teacher) as far as the sampled token shows it. ``divergence``
looks at the teacher's ``top_k`` likeliest ids, and at all others as one more::

    M = (1 - beta) * policy + beta * teacher
    D = beta * KL(teacher, M) + (1 - beta) * KL(policy, M)      0 < beta < 1
    D = KL(teacher, policy)                                     beta = 0
    D = KL(policy, teacher)                                     beta = 1

Without the bucket of all others, probabilities of the policy outside the teacher's ``top_k`` would cost nothing, and a
reverse KL would move the policy there. Sources: GKD (arXiv 2306.13649), on-policy distillation with the sampled token
(Thinking Machines 2025), the bucket as in TRL 1.10's ``loss_add_tail``.
"""

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from rollmatch.learn.head import Logits, log_distribution, row_scores, to_device
from rollmatch.objectives.grpo.loss import (
    TERM_NAMES,
    PolicyRules,
    PolicySupervision,
    PolicyTerms,
    PolicyTotals,
    column_of,
    policy_logprobs,
    score_tokens,
    supervised_rows,
)

OF_TEACHERS = ("teacher_kl", "divergence", "teacher_logprob", "policy_logprob", "teacher_agree")
DISTILL_TERM_NAMES = (*TERM_NAMES, *OF_TEACHERS)
"""Figures of a step, means over tokens: l - t, D (0 with ``sampled``), t, l, and the share of tokens that are the
teacher's likeliest."""
LEAST_REST = 1e-7
"""Probability that the bucket of all others has at least, as in TRL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """``loss: divergence``; fields as in ``DistillConfig``."""

    beta: float
    top_k: int

    def of(self, policy: Tensor, top_ids: Tensor, teacher: Tensor) -> Tensor:
        """[n] from the policy's log-probabilities [n, V], and the teacher's [n, k] of the ids ``top_ids`` [n, k].

        In float64 the teacher's bucket, one minus the others, is no rounding.

        >>> policy, ids = torch.tensor([[0.5, 0.2, 0.3]]).log(), torch.tensor([[0, 2]])
        >>> teacher = torch.tensor([[0.6, 0.3]]).log()
        >>> [round(Divergence(beta=beta, top_k=2).of(policy, ids, teacher).item(), 4) for beta in (0, 0.5, 1)]
        [0.0401, 0.0108, 0.0475]
        """
        policy, teacher = _top_and_rest(policy, top_ids), _with_rest(teacher).to(policy.dtype)
        if self.beta == 0:
            return _kl(teacher, policy)
        if self.beta == 1:
            return _kl(policy, teacher)
        share = torch.tensor(self.beta, dtype=policy.dtype, device=policy.device)
        mixture = torch.logaddexp(policy + torch.log1p(-share), teacher + torch.log(share))
        return share * _kl(teacher, mixture) + (1 - share) * _kl(policy, mixture)


def distill_loss(  # noqa: PLR0913  # as policy_loss
    logits: Logits,
    *,
    supervision: PolicySupervision,
    rules: PolicyRules,
    divergence: Divergence | None,
    totals: PolicyTotals,
    is_kept: bool,
) -> PolicyTerms:
    """As ``policy_loss``, with the teachers' part; without ``divergence`` that of the sampled tokens.

    Every token needs a teacher. Errors: ``policy-logits-misfit``.
    """
    device = logits.device
    weights = to_device(supervision.teacher_weights, dtype=torch.float32, device=device)
    if divergence is None:
        logprobs = policy_logprobs(logits, supervision=supervision, rules=rules, is_kept=is_kept)
        divergences = torch.zeros_like(logprobs)
    else:
        logits = supervised_rows(logits, supervision, is_kept=is_kept)
        logprobs, divergences = _logprobs_and_divergences(logits, supervision, rules, divergence)
    now = logprobs.detach()

    def teaching(old: Tensor) -> Tensor:
        return weights * (column_of(supervision.teacher_logprobs, otherwise=old) - old)

    terms = score_tokens(
        logprobs,
        supervision=supervision,
        rules=rules,
        totals=totals,
        teaching=teaching if divergence is None else None,
        divergences=None if divergence is None else weights * divergences,
    )
    taught = column_of(supervision.teacher_logprobs, otherwise=now)
    columns = (now - taught, divergences.detach(), taught, now)
    sums = torch.stack([column.float().sum() for column in columns]).tolist()
    pairs = zip(supervision.teacher_top, supervision.token_ids, strict=True)
    sums.append(float(sum(bool(top and top[0][0] == token_id) for top, token_id in pairs)))
    means = [value / (totals.num_tokens or 1) for value in sums]
    return PolicyTerms(total=terms.total, figures=terms.figures | dict(zip(OF_TEACHERS, means, strict=True)))


def _logprobs_and_divergences(
    logits: Logits, supervision: PolicySupervision, rules: PolicyRules, divergence: Divergence
) -> tuple[Tensor, Tensor]:
    """[K] of the sampled tokens, [K] between the distributions; from one pass over the logits."""
    device = logits.device
    tops = [top or () for top in supervision.teacher_top]
    shape = (len(tops), divergence.top_k)
    top_ids = to_device((i for top in tops for i, _ in top), dtype=torch.int64, device=device).view(shape)
    teacher = to_device((value for top in tops for _, value in top), dtype=torch.float64, device=device).view(shape)
    ids = to_device(supervision.token_ids, dtype=torch.int64, device=device)

    def score(rows: Tensor, some: Tensor, some_top: Tensor, some_teacher: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = log_distribution(rows, temperature=rules.temperature, excluded_ids=rules.excluded_ids)
        return (
            logprobs.gather(-1, some[:, None])[:, 0],
            divergence.of(logprobs, some_top, some_teacher),
        )

    logprobs, divergences = row_scores(logits, score, ids, top_ids, teacher)
    return logprobs, divergences


def _top_and_rest(logprobs: Tensor, top_ids: Tensor) -> Tensor:
    """[n, k + 1] of a whole distribution [n, V]; the others are summed, as 1 minus the top would be rounding alone."""
    others = logprobs.scatter(-1, top_ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, top_ids), others.clamp(min=log(LEAST_REST))], dim=-1)


def _with_rest(logprobs: Tensor) -> Tensor:
    """[n, k + 1], of which nothing but the top [n, k] is known."""
    whole = logprobs.logsumexp(-1, keepdim=True).clamp(max=-LEAST_REST)
    return torch.cat([logprobs, torch.log(-torch.expm1(whole))], dim=-1)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    """[n] KL(one, other) of log-probabilities [n, k]."""
    return (one.exp() * (one - other)).sum(-1)
