"""A bucket of raw bytes as ms-swift's trainer announces it; written apart from the code that is judged."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def flat_metadata(tensors: Mapping[str, Tensor], **fields: Any) -> list[dict[str, Any]]:
    """Where each tensor lies, in bytes; ``fields`` are added to each, or take a value's place."""
    told: list[dict[str, Any]] = []
    start = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        place = {"start_idx": start, "end_idx": start + size, "numel": size}
        told.append({"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)} | place | fields)
        start += size
    return told
