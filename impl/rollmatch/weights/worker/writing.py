"""Tensors into the places that were learnt for them."""

from collections.abc import Mapping
from typing import Any

import torch

from rollmatch.weights.worker.loading import load_into
from rollmatch.weights.worker.places import Place, Places


@torch.no_grad()
def write_tensors(model: Any, places: Places, tensors: Mapping[str, torch.Tensor]) -> None:
    """All tensors, wherever they go. Errors: ``LoadFailed``."""
    for name, tensor in tensors.items():
        write_parts(places.by_name[name], tensor)
        whole = places.by_name[name].whole
        if whole is not None and whole.data_ptr() != tensor.data_ptr():  # else it was made there
            whole.copy_(tensor.reshape(-1))
    load_changed(model, places, tensors)
    fill_padding(places)


def write_parts(place: Place, tensor: torch.Tensor) -> None:
    """The parts that are copied; a tensor that goes elsewhere as a whole has none."""
    for copy in place.copies:
        copy.target.copy_(tensor.contiguous().as_strided(copy.shape, copy.strides, copy.offset))


def load_changed(model: Any, places: Places, tensors: Mapping[str, torch.Tensor]) -> None:
    """Those that vLLM's loader changes on the way. Errors: ``LoadFailed``."""
    changed = {name: tensor for name, tensor in tensors.items() if places.by_name[name].by_loader}
    if changed:
        load_into(model, changed)


@torch.no_grad()
def fill_padding(places: Places) -> None:
    """What no tensor brings."""
    for target, value in places.fills:
        target.fill_(value)
