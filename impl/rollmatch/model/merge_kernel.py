"""``merge_weight`` on a GPU: the sum is made where it is rounded, and never stands in memory in float32.

A DoRA's rows are read twice, for their lengths and for the result; the second time mostly from the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS, _LEAST_RANK = 16, 256, 16
"""Of the tiles of a matrix product; 16 is the least that it takes."""
_WARPS = 4
_PRECISION = "tf32x3"
"""Float32 products from three passes of the tensor cores; "ieee" without them."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _summed(weight, lora_a, lora_b, scaling, at, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """[ROWS, COLUMNS] float32 of weight + scaling * B @ A; ``at``: rows, columns, ranks and their numbers."""
    rows, columns, ranks, num_out, num_in, rank = at
    inside = (rows < num_out)[:, None] & (columns < num_in)[None, :]
    a = tl.load(
        lora_a + ranks[:, None] * num_in + columns[None, :],
        mask=(ranks < rank)[:, None] & (columns < num_in)[None, :],
        other=0.0,
    )
    part = tl.load(weight + rows.to(tl.int64)[:, None] * num_in + columns[None, :], mask=inside, other=0.0)
    return part.to(tl.float32) + tl.dot(lora_b, a, input_precision=PRECISION) * scaling


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _merge(  # type: ignore[no-untyped-def]  # noqa: ANN202
    weight,  # noqa: ANN001
    lora_a,  # noqa: ANN001
    lora_b,  # noqa: ANN001
    magnitude,  # noqa: ANN001
    out,  # noqa: ANN001
    num_out,  # noqa: ANN001
    num_in,  # noqa: ANN001
    rank,  # noqa: ANN001
    scaling,  # noqa: ANN001
    HAS_MAGNITUDE: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per ``ROWS`` rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ranks = tl.arange(0, RANK)
    b = tl.load(
        lora_b + rows[:, None] * rank + ranks[None, :],
        mask=(rows < num_out)[:, None] & (ranks < rank)[None, :],
        other=0.0,
    )
    factor = tl.full([ROWS], 1.0, tl.float32)
    if HAS_MAGNITUDE:
        squares = tl.zeros([ROWS], tl.float32)
        for first in range(0, num_in, COLUMNS):
            at = (rows, first + tl.arange(0, COLUMNS), ranks, num_out, num_in, rank)
            tile = _summed(weight, lora_a, b, scaling, at, PRECISION)
            squares += tl.sum(tile * tile, axis=1)
        factor = tl.load(magnitude + rows, mask=rows < num_out, other=0.0).to(tl.float32) / tl.sqrt(squares)
    for first in range(0, num_in, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        at = (rows, columns, ranks, num_out, num_in, rank)
        tile = _summed(weight, lora_a, b, scaling, at, PRECISION) * factor[:, None]
        inside = (rows < num_out)[:, None] & (columns < num_in)[None, :]
        here = out + rows.to(tl.int64)[:, None] * num_in + columns[None, :]
        tl.store(here, tile.to(out.dtype.element_ty), mask=inside)


def merge_on_gpu(
    weight: Tensor, lora: tuple[Tensor, Tensor], magnitude: Tensor | None, scaling: float, *, out: Tensor
) -> Tensor:
    """``merge_weight`` with ``lora``, A [R, I] and B [O, R], on the current stream. The shapes were checked."""
    (num_out, num_in), (lora_a, lora_b) = weight.shape, lora
    rank = len(lora_a)
    with torch.cuda.device(weight.device):  # a kernel starts on the calling thread's, wherever its arguments are
        _merge[(triton.cdiv(num_out, _ROWS),)](
            weight,
            lora_a.contiguous(),
            lora_b.contiguous(),
            weight if magnitude is None else magnitude.contiguous(),
            out,
            num_out,
            num_in,
            rank,
            scaling,
            HAS_MAGNITUDE=magnitude is not None,
            RANK=max(_LEAST_RANK, triton.next_power_of_2(rank)),
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            PRECISION=_PRECISION,
            num_warps=_WARPS,
        )
    return out
