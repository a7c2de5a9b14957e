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


def cut(flat: Tensor, tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
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
