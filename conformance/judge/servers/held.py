"""Weights of a checkpoint, written into a model that may hold them in other tensors."""

from collections.abc import Mapping
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from rollmatch.model.checkpoint import checkpoint_names, model_tensors


class HeldWeights:
    """The tensors of a model, written by the names of its checkpoint.

    A model holds all experts of a layer in one tensor, whose checkpoint may have one tensor for each. Such tensors
    become parts of one piece of memory, in which each of the checkpoint's has its places.
    """

    def __init__(self, model: nn.Module) -> None:
        names, kept = checkpoint_names(model), dict(model_tensors(model))
        self._whole = {name: tensor for key, tensor in kept.items() if (name := names.name_of(key)) is not None}
        others = {key: tensor for key, tensor in kept.items() if names.name_of(key) is None}
        self._memory = (
            torch.cat([tensor.detach().flatten() for tensor in others.values()]) if others else torch.empty(0)
        )
        ends = accumulate((tensor.numel() for tensor in others.values()), initial=0)
        numbered = {}
        for (key, tensor), (start, end) in zip(others.items(), pairwise(ends), strict=True):
            tensor.data = self._memory[start:end].view(tensor.shape)
            numbered[key] = torch.arange(start, end).view(tensor.shape)
        self._places = {name: places.flatten() for name, places in names.convert(numbered.items())}
        """Name -> where its numbers are in ``_memory``."""

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Replace these tensors. Writing into one takes a hundredth of ``load_state_dict``. Errors: ``KeyError``."""
        for name, tensor in weights.items():
            if name in self._whole:
                self._whole[name].copy_(tensor)
            else:
                self._memory[self._places[name]] = tensor.flatten().to(self._memory.dtype)
