"""Weights of a checkpoint, written into a model that may hold them in other tensors."""

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor, nn

from rollmatch.model.checkpoint import checkpoint_names, model_tensors


class HeldWeights:
    """The tensors of a model, written by the names of its checkpoint.

    A model holds all experts of a layer in one tensor, whose checkpoint may have one tensor for each.
    """

    def __init__(self, model: nn.Module) -> None:
        names, kept = checkpoint_names(model), dict(model_tensors(model))
        self._whole = {name: tensor for key, tensor in kept.items() if (name := names.name_of(key)) is not None}
        others = {key: tensor for key, tensor in kept.items() if names.name_of(key) is None}
        starts = [0, *accumulate(tensor.numel() for tensor in others.values())]
        self._others = [(start, tensor.data.view(-1)) for start, tensor in zip(starts, others.values(), strict=False)]
        numbered = [
            (key, torch.arange(start, start + tensor.numel()).view(tensor.shape))
            for start, (key, tensor) in zip(starts, others.items(), strict=False)
        ]
        self._places = {name: places.flatten() for name, places in names.convert(numbered)}
        """Name -> where each of its numbers is, counted over all of ``_others``."""

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Replace these tensors. Writing into one takes a hundredth of ``load_state_dict``. Errors: ``KeyError``."""
        for name, tensor in weights.items():
            if name in self._whole:
                self._whole[name].copy_(tensor)
                continue
            places, numbers = self._places[name], tensor.flatten()
            for start, held in self._others:
                inside = (places >= start) & (places < start + held.numel())
                held[places[inside] - start] = numbers[inside].to(held.dtype)
