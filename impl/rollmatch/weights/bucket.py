"""Several tensors as one run of bytes."""

from collections.abc import Sequence

import torch
from torch import Tensor

BUCKET_BYTES = 4 * 2**20
"""Larger tensors travel alone, without a copy; smaller ones are copied together while they fit into a cache."""


class Buffer:
    """One stretch of memory, used for one bucket after the other; grows when a bucket does not fit."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def fill(self, parts: Sequence[Tensor]) -> Tensor:
        """[n] the bytes of tensors, one after the other, without padding.

        One part alone is not copied; the others' bytes are only good until the next call.

        >>> from rollmatch.weights.digest import bytes_of
        >>> Buffer().fill([bytes_of(torch.tensor([1, 2], dtype=torch.int8)), bytes_of(torch.tensor([[258]]))[:2]])
        tensor([1, 2, 2, 1], dtype=torch.uint8)
        """
        if len(parts) == 1:
            return parts[0]
        size = sum(len(part) for part in parts)
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return torch.cat(list(parts), out=self._memory[:size]) if parts else self._memory[:0]
