"""The two passes of ``softmax`` on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
"""Logits that one program reads at a time."""
_WARPS = 16
_LOWEST = tl.constexpr(-3.0e38)
"""Below all logits but minus infinity, from which nothing may be subtracted."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _logsumexp(logits, out, num_ids, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """One program per row; the largest logit so far, and the sum of powers beside it."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.full([], _LOWEST, tl.float32)
    total = tl.zeros([], tl.float32)
    for first in range(0, num_ids, BLOCK):
        place = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * num_ids + place, mask=place < num_ids, other=float("-inf")).to(tl.float32) * scale
        larger = tl.maximum(most, tl.max(x))
        total = total * tl.exp(most - larger) + tl.sum(tl.exp(x - larger))
        most = larger
    tl.store(out + row, most + tl.log(total))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _probs(logits, everything, factors, num_ids, scale, SCALED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """One program per block of a row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = logits + row * num_ids + place
    x = tl.load(here, mask=place < num_ids).to(tl.float32) * scale
    prob = tl.exp(x - tl.load(everything + row))
    if SCALED:
        prob = prob * tl.load(factors + row)
    tl.store(here, prob.to(logits.dtype.element_ty), mask=place < num_ids)


def logsumexps_on_gpu(logits: Tensor, temperature: float) -> Tensor:
    """[n] float32 of contiguous logits [n, V] / temperature."""
    num_rows, num_ids = logits.shape
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    with torch.cuda.device(logits.device):  # a kernel starts on the calling thread's
        _logsumexp[(num_rows,)](logits, out, num_ids, 1 / temperature, BLOCK=_BLOCK, num_warps=_WARPS)
    return out


def to_probs_on_gpu(logits: Tensor, everything: Tensor, temperature: float, factors: Tensor | None) -> None:
    """As ``softmax.to_probs``, of contiguous logits."""
    num_rows, num_ids = logits.shape
    with torch.cuda.device(logits.device):
        _probs[(num_rows, triton.cdiv(num_ids, _BLOCK))](
            logits,
            everything.contiguous(),
            factors.float().contiguous() if factors is not None else everything,
            num_ids,
            1 / temperature,
            SCALED=factors is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
