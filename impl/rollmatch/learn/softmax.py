"""Softmax of rows of logits, written over the logits: two passes, and a number per row between them.

On a GPU each pass is one kernel and reads the logits once. Elsewhere torch makes them, for some rows at a time, because
it widens what it reads.
"""

import torch
from torch import Tensor

ROWS_AT_ONCE = 128
"""Rows that exist in float32 at a time."""


def logsumexps(logits: Tensor, temperature: float) -> Tensor:
    """[n] of logits [n, V] / temperature, in float32 at least.

    >>> logsumexps(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), 0.5).sub(0.6931472).tolist()
    [0.0, 2.0]
    """
    if _by_kernel(logits):
        from rollmatch.learn.softmax_kernel import logsumexps_on_gpu

        return logsumexps_on_gpu(logits, temperature)
    return torch.cat([(_float32(some) / temperature).logsumexp(-1) for some in torch.split(logits, ROWS_AT_ONCE)])


def to_probs(logits: Tensor, everything: Tensor, temperature: float, *, factors: Tensor | None = None) -> None:
    """Write softmax(logits / temperature) over logits [n, V], each row times its factor; ``everything``: logsumexps.

    >>> logits = torch.tensor([[0.0, 0.0]])
    >>> to_probs(logits, logsumexps(logits, 1.0), 1.0, factors=torch.tensor([4.0]))
    >>> [round(prob, 6) for prob in logits[0].tolist()]
    [2.0, 2.0]
    """
    if _by_kernel(logits):
        from rollmatch.learn.softmax_kernel import to_probs_on_gpu

        to_probs_on_gpu(logits, everything, temperature, factors)
        return
    for first in range(0, len(logits), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        probs = (_float32(logits[rows]) / temperature).sub_(everything[rows, None]).exp_()
        if factors is not None:
            probs.mul_(factors[rows, None])
        logits[rows] = probs


def _float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _by_kernel(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype != torch.float64 and logits.is_contiguous() and logits.numel() > 0
