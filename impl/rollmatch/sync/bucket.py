"""Several tensors as one run of bytes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollmatch.wire.digest import bytes_of


class Buffer:
    """One stretch of memory, used for one bucket after the other; grows when a bucket does not fit."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def fill(self, tensors: Sequence[Tensor]) -> Tensor:
        """[n] the tensors' raw bytes in C order, one after the other, without padding.

        One tensor alone is not copied; the others' bytes are only good until the next call.

        >>> Buffer().fill([torch.tensor([1, 2], dtype=torch.int8), torch.tensor([[258]], dtype=torch.int16)]).tolist()
        [1, 2, 2, 1]
        """
        parts = [bytes_of(tensor.cpu()) for tensor in tensors]
        if len(parts) == 1:
            return parts[0]
        size = sum(len(part) for part in parts)
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return torch.cat(parts, out=self._memory[:size]) if parts else self._memory[:0]
