"""A weight merged with its LoRA or DoRA; learner and server choose the same one of two computations.

In half precision on a GPU: one kernel, which sums in float32 and rounds once; it differs from peft's merge by less than
the rounding of the result. Elsewhere: operation by operation as peft does, bit for bit; on a CPU, a few rows at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

HALVES = (torch.bfloat16, torch.float16)
_BLOCK, _LEAST_ROWS = 2**17, 8
"""Elements that are merged at once on a CPU, and rows: a row alone would be summed in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFactors:
    """The adapter of one weight [O, I] (or [O, I, ...] of a convolution)."""

    lora_a: Tensor
    """[R, I]."""
    lora_b: Tensor
    """[O, R]."""
    magnitude: Tensor | None
    """[O] of a DoRA."""
    scaling: float

    def of_rows(self, rows: slice) -> "LoraFactors":
        """The adapter of these rows of a linear weight."""
        magnitude = None if self.magnitude is None else self.magnitude[rows]
        return replace(self, lora_b=self.lora_b[rows], magnitude=magnitude)


@torch.no_grad()
def merge_weight(weight: Tensor, factors: LoraFactors, *, out: Tensor | None = None) -> Tensor:
    """The merged weight, in ``out`` where that is given: contiguous, of the weight's shape and type.

    Errors: ``RuntimeError`` where the shapes do not fit. Source: peft 0.20 ``tuners/lora``; DoRA (arXiv 2402.09353).

    >>> a, b = torch.tensor([[1., 2.]]), torch.tensor([[1.], [0.]])
    >>> merge_weight(torch.zeros(2, 2), LoraFactors(lora_a=a, lora_b=b, magnitude=None, scaling=0.5))
    tensor([[0.5000, 1.0000],
            [0.0000, 0.0000]])
    """
    check_fit(weight, factors)
    if merges_by_kernel(weight, factors):
        into = torch.empty_like(weight) if out is None else out
        merge_by_kernel([AdaptedWeight(weight, factors, into)])
        return into
    if weight.is_cuda or weight.dim() > 2:
        merged = _merge_whole(weight, factors)
        return merged if out is None else out.copy_(merged)
    merged = torch.empty_like(weight) if out is None else out
    if factors.lora_a.dtype == factors.lora_b.dtype == torch.float32 and weight.dtype in (*HALVES, torch.float32):
        return _merge_in_blocks(weight, factors, merged)
    for rows in _row_blocks(weight):
        merged[rows] = _merge_whole(weight[rows], factors.of_rows(rows))
    return merged


class AdaptedWeight(NamedTuple):
    """A weight, its adapter and the memory of the merged weight."""

    weight: Tensor
    factors: LoraFactors
    out: Tensor


def merge_by_kernel(merges: Sequence[AdaptedWeight]) -> None:
    """``merge_weight`` of weights on one GPU that ``merges_by_kernel`` and ``check_fit`` passed, in few launches."""
    from rollmatch.model.merge_kernel import KernelWork, merge_all_on_gpu, merge_on_gpu

    works = [KernelWork(weight, f.lora_a, f.lora_b, f.magnitude, f.scaling, out) for weight, f, out in merges]
    if len(works) == 1:
        merge_on_gpu(works[0])  # without a table
    else:
        merge_all_on_gpu(works)


def _merge_in_blocks(weight: Tensor, factors: LoraFactors, merged: Tensor) -> Tensor:
    """As ``_merge_whole``, the same operations in the same order, in memory that all blocks use.

    New memory for every block takes several times as long as the arithmetic.
    """
    blocks = list(_row_blocks(weight))
    num_rows = max(rows.stop - rows.start for rows in blocks)
    # Each by itself: MKL rounds by where memory begins, and torch begins new memory where a whole product would be.
    wide, total = (torch.empty(num_rows, weight.shape[1]) for _ in range(2))
    for rows in blocks:
        summed, base = total[: rows.stop - rows.start], wide[: rows.stop - rows.start]
        torch.mm(factors.lora_b[rows], factors.lora_a, out=summed)
        summed.mul_(factors.scaling).add_(base.copy_(weight[rows]))
        if factors.magnitude is not None:
            norms = torch.linalg.norm(summed, dim=1)
            summed.mul_((factors.magnitude[rows] / norms).view(-1, 1))
        merged[rows] = summed
    return merged


def check_fit(weight: Tensor, factors: LoraFactors) -> None:
    """Rows of B beyond the weight's, or a single one, would be merged without an error of torch.

    Errors: ``RuntimeError``.
    """
    if weight.dim() != 2:
        return
    (num_out, num_in), rank = weight.shape, len(factors.lora_a)
    magnitude = num_out if factors.magnitude is None else factors.magnitude.numel()
    shapes = [tuple(factors.lora_a.shape), tuple(factors.lora_b.shape), magnitude]
    if shapes != [(rank, num_in), (num_out, rank), num_out]:
        raise RuntimeError(f"an adapter of {shapes} does not fit a weight of {tuple(weight.shape)}")


def _row_blocks(weight: Tensor) -> Iterator[slice]:
    """Blocks of a matrix that fit into a core's cache; the last one takes what would be less than a block.

    >>> list(_row_blocks(torch.empty(100, 4096)))
    [slice(0, 32, None), slice(32, 64, None), slice(64, 100, None)]
    """
    num_rows, num_columns = weight.shape
    size = max(_LEAST_ROWS, _BLOCK // max(1, num_columns))
    starts = range(0, max(1, num_rows - size + 1), size)
    yield from (slice(start, num_rows if start == starts[-1] else start + size) for start in starts)


def _merge_whole(weight: Tensor, factors: LoraFactors) -> Tensor:
    delta = _delta(weight, factors)
    if factors.magnitude is None:
        return (weight + delta).to(weight.dtype)
    return _with_magnitude(weight, delta, factors.magnitude)


def merges_by_kernel(weight: Tensor, factors: LoraFactors) -> bool:
    """Whether this is a linear weight in half precision on a GPU, with an adapter in float32."""
    is_half_linear = weight.is_cuda and weight.dim() == 2 and weight.dtype in HALVES and weight.is_contiguous()
    return is_half_linear and factors.lora_a.dtype == factors.lora_b.dtype == torch.float32


def _delta(weight: Tensor, factors: LoraFactors) -> Tensor:
    """Half precision is multiplied in float32 on a CPU, as peft does."""
    lora_a, lora_b, dtype = factors.lora_a, factors.lora_b, factors.lora_b.dtype
    if lora_b.device.type == "cpu" and dtype in HALVES:
        lora_a, lora_b = lora_a.float(), lora_b.float()
    if weight.dim() > 2:
        convolve = {4: functional.conv2d, 5: functional.conv3d}[weight.dim()]
        product = convolve(lora_a.transpose(0, 1), lora_b).transpose(0, 1)
    else:
        product = lora_b @ lora_a
    return (product * factors.scaling).to(dtype)


def _with_magnitude(weight: Tensor, delta: Tensor, magnitude: Tensor) -> Tensor:
    summed = weight + delta
    if weight.dim() > 2:
        norm: Tensor = summed.norm(p=2, dim=tuple(range(1, summed.dim())), keepdim=True).transpose(1, 0)
        factor = (magnitude / norm).view(-1, *[1] * (weight.dim() - 1))
    else:
        factor = (magnitude / torch.linalg.norm(summed, dim=1).to(summed.dtype)).view(-1, 1)
    return (factor * summed).to(weight.dtype)
