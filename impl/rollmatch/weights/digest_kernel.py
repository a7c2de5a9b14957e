"""The sums of the mixed digest on a GPU: one launch for many tensors, each byte read once."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

_CHUNK_WORDS = 2**17
"""Words that one program reads."""
_BLOCK_WORDS = 1024


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_mixed(  # type: ignore[no-untyped-def]  # noqa: ANN202
    table,  # noqa: ANN001
    sums,  # noqa: ANN001
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    FURTHER: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``table``: address of a tensor, first word, number of words, row of ``sums``; one line per program."""
    line = table + tl.program_id(0) * 4
    words = tl.load(line).to(tl.pointer_type(tl.int64))
    first = tl.load(line + 1)
    count = tl.load(line + 2)
    row = tl.load(line + 3)
    sum_x = tl.zeros([BLOCK], tl.int64)
    sum_y = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < count
        word = tl.load(words + first + index, mask=inside, other=0).to(tl.uint64, bitcast=True)
        number = (first + index + 1).to(tl.uint64, bitcast=True)
        x = word + number * STEP
        x = (x ^ (x >> 30)) * FIRST
        x = (x ^ (x >> 27)) * FURTHER
        x = x ^ (x >> 31)
        y = (x ^ (x >> 32)) * SECOND
        sum_x += tl.where(inside, x.to(tl.int64, bitcast=True), 0)
        sum_y += tl.where(inside, y.to(tl.int64, bitcast=True), 0)
    tl.atomic_add(sums + row * 2, tl.sum(sum_x))
    tl.atomic_add(sums + row * 2 + 1, tl.sum(sum_y))


def add_mixed_at(addresses: Sequence[int], lengths: Sequence[int], sums: torch.Tensor, mix: Sequence[int]) -> None:
    """Add the sums of n runs of int64 words to [n, 2] ``sums``, on the current stream; ``mix``: ``MixConstants``."""
    table = table_of(addresses, lengths)
    if not len(table):
        return
    with torch.cuda.device(sums.device):  # a kernel starts on the calling thread's, wherever its arguments are
        on_device = torch.from_numpy(table).pin_memory().to(sums.device, non_blocking=True)
        _add_mixed[(len(table),)](on_device, sums, *mix, BLOCK=_BLOCK_WORDS)


def table_of(addresses: Sequence[int], lengths: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[m, 4] a line per program.

    >>> table_of([64, 128], [2**17 + 1, 3]).tolist()
    [[64, 0, 131072, 0], [64, 131072, 1, 0], [128, 0, 3, 1]]
    """
    given = np.array([addresses, lengths], dtype=np.int64).reshape(2, -1)
    nums = -(-given[1] // _CHUNK_WORDS)
    row = np.repeat(np.arange(len(nums)), nums)
    line_in_row = np.arange(len(row)) - np.repeat(np.cumsum(nums) - nums, nums)
    first = line_in_row * _CHUNK_WORDS
    return np.stack([given[0][row], first, np.minimum(given[1][row] - first, _CHUNK_WORDS), row], axis=1)
