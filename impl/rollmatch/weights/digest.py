"""Tensors as bytes, and one digest per tensor, which shows on both sides whether the bytes are the same.

XXH3 with 128 bits hashes as fast as memory is read. It finds faults of a transport, not forgers: whoever may send
weights may send any.
"""

from collections.abc import Sequence
from typing import Any

import torch
from xxhash import xxh3_128_digest

DIGEST_KIND = "xxh3-128"
NUM_DIGEST_BYTES = 16


def digest_of(tensor: torch.Tensor) -> bytes:
    """[16] digest of a tensor's raw bytes in C order; type and shape are not part of it.

    >>> digest_of(torch.zeros(2)) == digest_of(torch.zeros(2, 1)), digest_of(torch.zeros(2)) == digest_of(torch.ones(2))
    (True, False)
    """
    return digest_of_bytes(bytes_of(tensor).cpu())


def digest_of_bytes(raw: torch.Tensor) -> bytes:
    """[16] the same of bytes that are one tensor's already.

    >>> digest_of_bytes(torch.zeros(0, dtype=torch.uint8)).hex()
    '99aa06d3014798d86001c324468d497f'
    """
    told: Any = raw.numpy()
    return xxh3_128_digest(told)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """[n] the tensor's bytes, a view where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def cut(flat: torch.Tensor, tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[torch.Tensor]:
    """The tensors of a bucket, as views of its bytes where these are aligned.

    >>> cut(torch.tensor([1, 2, 2, 1], dtype=torch.uint8), [(torch.int8, (2,)), (torch.int16, (1, 1))])[1].tolist()
    [[258]]
    """
    found, start = [], 0
    for dtype, shape in tensors:
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        part = flat[start:stop]
        aligned = part if start % dtype.itemsize == 0 else part.clone()
        found.append(aligned.view(dtype).view(shape))
        start = stop
    return found
