"""Distillation, naively: whom a sample has as its teacher, and the divergence at one token.

Sources: GKD (arXiv 2306.13649), the specification (distillation).
"""

import torch

from conformance.oracle.sampling import TooClose

MARGIN = 1e-5
"""Between log-probabilities that decide what the teacher's likeliest tokens are."""


def teacher_of(entries, metadata):
    """Place of the first entry whose ``when`` the metadata has."""
    return next(i for i, one in enumerate(entries) if one.get("when", {}).items() <= metadata.items())


def divergence(policy, teacher, *, beta, top_k):
    """Of two rows of log-probabilities; all but the teacher's likeliest tokens count as one."""
    best = teacher.topk(top_k + 1)
    if best.values[-2] - best.values[-1] < MARGIN:
        raise TooClose
    top = best.indices[:-1]
    is_other = torch.ones_like(policy, dtype=torch.bool)
    is_other[top] = False
    rest = [row.exp()[is_other].sum()[None].clamp(min=1e-7) for row in (policy, teacher)]
    p, q = (torch.cat([row.exp()[top], other]) for row, other in zip((policy, teacher), rest, strict=True))
    if beta == 0:
        return (q * (q / p).log()).sum()
    if beta == 1:
        return (p * (p / q).log()).sum()
    mixture = (1 - beta) * p + beta * q
    return beta * (q * (q / mixture).log()).sum() + (1 - beta) * (p * (p / mixture).log()).sum()
