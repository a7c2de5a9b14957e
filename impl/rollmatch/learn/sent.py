"""Numbers sent to a device without waiting for what it is doing."""

from collections.abc import Iterable

import torch
from torch import Tensor


def sent(numbers: Iterable[float], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of them there; a GPU reads them from pinned memory when it gets that far.

    >>> sent([1, 2], dtype=torch.int64, device=torch.device("cpu"))
    tensor([1, 2])
    """
    made = torch.tensor(list(numbers), dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)
