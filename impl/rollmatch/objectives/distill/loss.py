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
MOST_IN_TOP = -1e-7
"""Largest logarithm of the top's whole probability: the bucket of all others is never empty, as in TRL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """``loss: divergence``; fields as in ``DistillConfig``."""

    beta: float
    top_k: int

    def of(self, policy: Tensor, teacher: Tensor) -> Tensor:
        """[n] from log-probabilities [n, k] of the same ids, by the policy and by the teacher.

        >>> halves, certain = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
        >>> [round(Divergence(beta=beta, top_k=2).of(halves, certain).item(), 4) for beta in (0, 0.5, 1)]
        [0.3681, 0.1017, 0.5108]
        """
        policy, teacher = _with_rest(policy), _with_rest(teacher)
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
    teacher = to_device((value for top in tops for _, value in top), dtype=torch.float32, device=device).view(shape)
    ids = to_device(supervision.token_ids, dtype=torch.int64, device=device)

    def score(rows: Tensor, some: Tensor, some_top: Tensor, some_teacher: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = log_distribution(rows, temperature=rules.temperature, excluded_ids=rules.excluded_ids)
        return (
            logprobs.gather(-1, some[:, None])[:, 0],
            divergence.of(logprobs.gather(-1, some_top), some_teacher.to(logprobs.dtype)),
        )

    logprobs, divergences = row_scores(logits, score, ids, top_ids, teacher)
    return logprobs, divergences


def _with_rest(logprobs: Tensor) -> Tensor:
    """[n, k + 1] with the log-probability of all other ids."""
    whole = logprobs.logsumexp(-1, keepdim=True).clamp(max=MOST_IN_TOP)
    return torch.cat([logprobs, torch.log(-torch.expm1(whole))], dim=-1)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    """[n] KL(one, other) of log-probabilities [n, k]."""
    return (one.exp() * (one - other)).sum(-1)
