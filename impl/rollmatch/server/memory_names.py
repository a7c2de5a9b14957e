"""Tensors as transformers names them in memory, as tensors of the checkpoint.

Trainers of TRL send ``named_parameters()``. Those names differ from a checkpoint's where transformers renames at
loading (Qwen2-VL), one tensor in memory may be several there (experts of Qwen3-MoE), and one of the same name may have
its last two dimensions swapped (experts of Qwen3-VL-MoE).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
import transformers

from rollmatch.model.checkpoint import CheckpointNames, model_tensors
from rollmatch.model.policy import load_architecture
from rollmatch.server.identity import Model
from rollmatch.server.payloads import TensorSpec
from rollmatch.weights.plan import TensorMismatch

Places = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of each tensor of a checkpoint whose bytes follow each other in one tensor in memory."""


class MemoryNames:
    """The names of a model in memory; found out when the first one is not a checkpoint's, which takes seconds."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @cached_property
    def _in_memory(self) -> "_InMemory":
        return _read(self._model)

    def are_of_checkpoint(self, specs: Sequence[TensorSpec]) -> bool:
        """Whether all names are those of the checkpoint."""
        return all(spec.name in self._model.tensors or spec.name in self._model.aliases for spec in specs)

    def stored(self, specs: Sequence[TensorSpec]) -> tuple[list[list[TensorSpec]], frozenset[str]]:
        """The checkpoint's tensors that each announced one is, and names of those whose dimensions are swapped.

        Errors: as ``swapped_in``.
        """
        parts = [self.parts_of([spec]) for spec in specs]
        swapped = self.swapped_in([part for each in parts for part in each])
        return [[_swap(part) if part.name in swapped else part for part in each] for each in parts], swapped

    def parts_of(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """The checkpoint's tensors that announced ones are; one that is none of the model's stays as it is."""
        return [part for spec in specs for part in self._parts_of(spec)]

    def swapped_in(self, specs: Sequence[TensorSpec]) -> frozenset[str]:
        """Names of those that are announced as they are in memory, with the dimensions of the checkpoint swapped.

        Errors: ``TensorMismatch``, where these are equal, so that nobody can know.
        """
        swapped = [spec for spec in specs if self._may_be_swapped(spec) and spec.name in self._in_memory.swapped]
        for spec in swapped:
            if spec.shape[-1] == spec.shape[-2]:
                problem = "may have its last two dimensions swapped, which are equal"
                remedy = "Send the weights by the native dialect."
                raise TensorMismatch(problem, key=spec.name, remedy=remedy, code="tensor-layout-unknown")
        return frozenset(spec.name for spec in swapped)

    def _may_be_swapped(self, spec: TensorSpec) -> bool:
        held = self._model.tensors.get(spec.name)
        is_stack = held is not None and len(held.shape) > 2  # of matrices
        return is_stack and held is not None and spec.shape == (*held.shape[:-2], held.shape[-1], held.shape[-2])

    def _parts_of(self, spec: TensorSpec) -> list[TensorSpec]:
        if self.are_of_checkpoint([spec]):
            return [spec]
        shape, places = self._in_memory.places.get(spec.name, ((), ()))
        if shape != spec.shape:
            return [spec]
        return [TensorSpec(name=name, dtype=spec.dtype, shape=part) for name, part in places]


def _swap(spec: TensorSpec) -> TensorSpec:
    """As it is stored."""
    return spec.model_copy(update={"shape": (*spec.shape[:-2], spec.shape[-1], spec.shape[-2])})


@dataclass(frozen=True, slots=True, kw_only=True)
class _InMemory:
    """Tensors of a model as transformers holds them."""

    places: Mapping[str, tuple[tuple[int, ...], Places]]
    """Name -> shape, and places in the checkpoint."""
    swapped: frozenset[str]
    """Names of those whose last two dimensions are swapped in the checkpoint."""


def _read(model: Model) -> _InMemory:
    """Of the model's own class, made without memory; empty where transformers has no such class."""
    config = load_architecture(model.directory)
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None:
        return _InMemory(places={}, swapped=frozenset())
    with torch.device("meta"):
        made = kind(config)
    tensors = dict(model_tensors(made))
    names = CheckpointNames(made, tensors)
    read = [(key, tuple(tensor.shape)) for key, tensor in tensors.items() if names.is_separate(key)]
    return _InMemory(
        places={key: (shape, places) for key, shape in read if (places := _places(names, key, shape, model))},
        swapped=frozenset(key for key, shape in read if _is_swapped(names, key, shape)),
    )


def _is_swapped(names: CheckpointNames, key: str, shape: tuple[int, ...]) -> bool:
    """Seen by numbers in matrices of 2 x 3."""
    if len(shape) <= 2:  # no stack of matrices
        return False
    numbers = torch.arange(prod(shape[:-2]) * 6).view(*shape[:-2], 2, 3)
    parts = list(names.convert([(key, numbers)]))
    return len(parts) == 1 and parts[0][0] == key and torch.equal(parts[0][1], numbers.mT)


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
