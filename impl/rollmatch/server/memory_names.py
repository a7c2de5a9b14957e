"""Tensors as transformers names them in memory, as tensors of the checkpoint.

Trainers of TRL send ``named_parameters()``. Those names differ from a checkpoint's where transformers renames at
loading (Qwen2-VL), and one tensor in memory may be several there (experts of Qwen3-MoE).
"""

from collections.abc import Sequence
from math import prod

import torch
import transformers
from transformers import AutoConfig

from rollmatch.model.checkpoint import CheckpointNames, model_tensors
from rollmatch.server.identity import Model
from rollmatch.server.payloads import TensorSpec

Places = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of each tensor of a checkpoint whose bytes follow each other in one tensor in memory."""


class MemoryNames:
    """The names of a model in memory; found out when the first one is not a checkpoint's, which takes seconds."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: dict[str, tuple[tuple[int, ...], Places]] | None = None
        """Name in memory -> shape there, and places."""

    def are_of_checkpoint(self, specs: Sequence[TensorSpec]) -> bool:
        """Whether all names are those of the checkpoint."""
        return all(spec.name in self._model.tensors or spec.name in self._model.aliases for spec in specs)

    def parts_of(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """The checkpoint's tensors that announced ones are; one that is none of the model's stays as it is."""
        return [part for spec in specs for part in self._parts_of(spec)]

    def _parts_of(self, spec: TensorSpec) -> list[TensorSpec]:
        if self.are_of_checkpoint([spec]):
            return [spec]
        if self._known is None:
            self._known = _read(self._model)
        shape, places = self._known.get(spec.name, ((), ()))
        if shape != spec.shape:
            return [spec]
        return [TensorSpec(name=name, dtype=spec.dtype, shape=part) for name, part in places]


def _read(model: Model) -> dict[str, tuple[tuple[int, ...], Places]]:
    """Of the model's own class, made without memory; empty where transformers has no such class."""
    config = AutoConfig.from_pretrained(model.directory)
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None:
        return {}
    with torch.device("meta"):
        made = kind(config)
    tensors = dict(model_tensors(made))
    names = CheckpointNames(made, tensors)
    read = ((key, tuple(tensor.shape)) for key, tensor in tensors.items() if names.is_separate(key))
    return {key: (shape, places) for key, shape in read if (places := _places(names, key, shape, model))}


def _places(names: CheckpointNames, key: str, shape: tuple[int, ...], model: Model) -> Places:
    """Where a tensor's rows lie in the checkpoint, seen by numbers in rows of two; empty: not one after the other."""
    short = (*shape[:-1], 2) if len(shape) > 1 else shape
    numbers = torch.arange(prod(short)).view(short)
    parts = sorted(dict(names.convert([(key, numbers)])).items(), key=lambda part: int(part[1].flatten()[0]))
    held = [model.tensors.get(name) for name, _ in parts]
    whole = [(*part.shape[:-1], shape[-1]) if len(shape) > 1 else tuple(part.shape) for _, part in parts]
    if [spec and spec.shape for spec in held] != whole:
        return ()
    if not torch.equal(torch.cat([part.flatten() for _, part in parts]), numbers.flatten()):
        return ()
    return tuple((name, part) for (name, _), part in zip(parts, whole, strict=True))
