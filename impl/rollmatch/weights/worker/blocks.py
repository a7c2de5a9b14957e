"""Memory that is used again by every sync: memory of its first use costs as much time as what is written to it."""

import torch


class Blocks:
    """Blocks of bytes by their size; one thread takes, another gives back."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] a block whose content is of no interest. Blocks of other sizes go when one does not fit."""
        found = self._free.get(num_bytes)
        if found:
            return found.pop()
        if found is None:  # another plan than before: its blocks would stay for ever
            self._free = {}
        return torch.empty(num_bytes, dtype=torch.uint8)

    def give_back(self, blocks: list[torch.Tensor]) -> None:
        """Blocks that nobody reads or writes any more."""
        for block in blocks:
            self._free.setdefault(len(block), []).append(block)
