"""The frozen weights of the model directory, kept where adapters are merged, so that no merge reads a file twice."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open

_SPARE_BYTES = 4 * 2**30
"""Of a GPU's memory, left to the engine and to merging."""


class FrozenWeights:
    """Read on demand; floating ones in the served type. On a GPU while it has room, else in pinned memory."""

    def __init__(self, directory: str, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._paths: dict[str, Path] = {}
        for path in sorted(Path(directory).glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._paths |= dict.fromkeys(file.keys(), path)
        self._kept: dict[str, torch.Tensor] = {}
        self.changed: set[str] | None = None
        """Names of served weights that are not the base's; None for all."""

    def take(self, name: str) -> torch.Tensor:
        """On the device; kept for the next merge. Errors: ``KeyError``."""
        if name not in self._kept:
            self._kept[name] = self._keep(self.read(name))
        return self._kept[name].to(self.device, non_blocking=True)

    def read(self, name: str) -> torch.Tensor:
        """From the file, not kept."""
        with safe_open(self._paths[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def names_to_restore(self, names: Iterable[str], merged: Iterable[str]) -> list[str]:
        """Of the weights ``names``: those that something else was loaded into, and that no merge writes anew."""
        return sorted(set(names) - set(merged) if self.changed is None else self.changed - set(merged))

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type != "cuda":
            return tensor
        free, _ = torch.cuda.mem_get_info(self.device)
        return tensor.to(self.device) if free > tensor.nbytes + _SPARE_BYTES else tensor.pin_memory()
