"""``merge_weight`` on a GPU: the sum is made where it is rounded, and never stands in memory in float32.

A DoRA's rows are read twice, for their lengths and for the result; the second time mostly from the cache.
"""

from collections.abc import Sequence
from itertools import chain
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS, _LEAST_RANK = 16, 256, 16
"""Of the tiles of a matrix product; 16 is the least that it takes."""
_WARPS = 4
_HALVES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_MOST_ALIGNED = 16
"""Bytes that one instruction reads at most."""
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
def _merge_rows(  # type: ignore[no-untyped-def]  # noqa: ANN202
    places,  # noqa: ANN001
    first_row,  # noqa: ANN001
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
    """``ROWS`` rows; ``places``: the weight, A, B, the magnitude and the result."""
    weight, lora_a, lora_b, magnitude, out = places
    rows = first_row + tl.arange(0, ROWS)
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


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _merge_one(  # type: ignore[no-untyped-def]  # noqa: ANN202
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
    """One program per ``ROWS`` rows of one weight, which needs no table in the memory of the GPU."""
    places = (weight, lora_a, lora_b, magnitude, out)
    first_row = tl.program_id(0) * ROWS
    _merge_rows(places, first_row, num_out, num_in, rank, scaling, HAS_MAGNITUDE, RANK, ROWS, COLUMNS, PRECISION)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _merge_listed(  # type: ignore[no-untyped-def]  # noqa: ANN202
    table,  # noqa: ANN001
    num_in,  # noqa: ANN001
    rank,  # noqa: ANN001
    scaling,  # noqa: ANN001
    HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_MAGNITUDE: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``table``: addresses of the weight, A, B, the magnitude and the result, first row, number of rows; a line per
    program."""
    line = table + tl.program_id(0) * 7
    weight = tl.multiple_of(tl.load(line).to(tl.pointer_type(HALF)), ALIGNED)
    lora_a = tl.multiple_of(tl.load(line + 1).to(tl.pointer_type(tl.float32)), ALIGNED)
    lora_b = tl.multiple_of(tl.load(line + 2).to(tl.pointer_type(tl.float32)), ALIGNED)
    magnitude = tl.multiple_of(tl.load(line + 3).to(tl.pointer_type(tl.float32)), ALIGNED)
    out = tl.multiple_of(tl.load(line + 4).to(tl.pointer_type(HALF)), ALIGNED)
    places = (weight, lora_a, lora_b, magnitude, out)
    first_row, num_out = tl.load(line + 5).to(tl.int32), tl.load(line + 6).to(tl.int32)
    _merge_rows(places, first_row, num_out, num_in, rank, scaling, HAS_MAGNITUDE, RANK, ROWS, COLUMNS, PRECISION)


class KernelWork(NamedTuple):
    """One weight [O, I], contiguous and in half precision, and its adapter in float32."""

    weight: Tensor
    lora_a: Tensor
    """[R, I]."""
    lora_b: Tensor
    """[O, R]."""
    magnitude: Tensor | None
    """[O]."""
    scaling: float
    out: Tensor
    """As ``weight``."""


def merge_on_gpu(work: KernelWork) -> None:
    """``merge_weight`` on the current stream. The shapes were checked."""
    weight, lora_a, lora_b, magnitude, scaling, out = work
    num_out, num_in = weight.shape
    with torch.cuda.device(weight.device):  # a kernel starts on the calling thread's, wherever its arguments are
        _merge_one[(triton.cdiv(num_out, _ROWS),)](
            weight,
            lora_a.contiguous(),
            lora_b.contiguous(),
            weight if magnitude is None else magnitude.contiguous(),
            out,
            num_out,
            num_in,
            len(lora_a),
            scaling,
            **_constants(len(lora_a), has_magnitude=magnitude is not None),
        )


def merge_all_on_gpu(works: Sequence[KernelWork]) -> None:
    """As ``merge_on_gpu``, by one launch for all of one kind; all are on one GPU."""
    by_kind: dict[tuple[object, ...], list[KernelWork]] = {}
    for work in works:
        kind = work.weight.dtype, work.weight.shape[1], len(work.lora_a), work.scaling, work.magnitude is not None
        by_kind.setdefault(kind, []).append(work)
    for some in by_kind.values():
        _merge_kind(some)


def _merge_kind(works: Sequence[KernelWork]) -> None:
    first = works[0]
    held = [[part.contiguous() for part in _parts_of(work)] for work in works]  # until the kernel is queued
    addresses = [[part.data_ptr() for part in parts] for parts in held]
    table = table_of(addresses, [len(work.weight) for work in works])
    device = first.weight.device
    with torch.cuda.device(device):
        _merge_listed[(len(table),)](
            torch.from_numpy(table).pin_memory().to(device, non_blocking=True),
            first.weight.shape[1],
            len(first.lora_a),
            first.scaling,
            HALF=_HALVES[first.weight.dtype],
            ALIGNED=gcd(_MOST_ALIGNED, *chain.from_iterable(addresses)),
            **_constants(len(first.lora_a), has_magnitude=first.magnitude is not None),
        )


def _parts_of(work: KernelWork) -> list[Tensor]:
    magnitude = work.weight if work.magnitude is None else work.magnitude
    return [work.weight, work.lora_a, work.lora_b, magnitude, work.out]


def table_of(
    addresses: Sequence[Sequence[int]], nums_out: Sequence[int]
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[m, 7] a line per program.

    >>> table_of([[16, 32, 48, 64, 80]], [20])[:, 4:].tolist()
    [[80, 0, 20], [80, 16, 20]]
    """
    given = np.array([[*places, 0, num_out] for places, num_out in zip(addresses, nums_out)], dtype=np.int64)
    nums = -(-given[:, 6] // _ROWS)
    table = np.repeat(given, nums, axis=0)
    table[:, 5] = (np.arange(len(table)) - np.repeat(np.cumsum(nums) - nums, nums)) * _ROWS
    return table


def _constants(rank: int, *, has_magnitude: bool) -> dict[str, object]:
    return {
        "HAS_MAGNITUDE": has_magnitude,
        "RANK": max(_LEAST_RANK, triton.next_power_of_2(rank)),
        "ROWS": _ROWS,
        "COLUMNS": _COLUMNS,
        "PRECISION": _PRECISION,
        "num_warps": _WARPS,
    }
