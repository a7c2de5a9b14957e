"""Weight layout: where every tensor of a checkpoint lives in vLLM's model. Learnt once, without a table of models.

vLLM fuses (q, k and v in one parameter), pads (vocabularies), ties (heads) and splits (tensor parallelism). Its own
loader knows all of that, so ``load_tracer`` runs it on placeholders.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rollmatch.weights.plan import Spec
from rollmatch.weights.worker.load_tracer import Copy, LayoutUnknown, LoadTrace, storage_of, trace_load
from rollmatch.weights.worker.receiver import load_by

Extent = NDArray[np.int64]
"""[n, 2] first byte and end of runs of bytes in one storage."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where one tensor goes. With none of the three it is not in the model, or there by another name."""

    whole: torch.Tensor | None = None
    """[n] all of it, contiguous in a parameter: broadcasts may end there."""
    copies: tuple[Copy, ...] = ()
    """Parts of it, to be copied."""
    by_loader: bool = False
    """Whether vLLM's loader changes it on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    """Locations of all tensors; valid as long as the model's memory stays where it was."""

    by_name: Mapping[str, Location]
    fills: tuple[tuple[torch.Tensor, float], ...] = ()
    """Paddings and their value."""
    model: nn.Module = field(repr=False)
    held: tuple[Mapping[str, torch.Tensor | None], ...] = field(repr=False)
    """Where its modules keep their tensors: a walk through the modules takes nine times as long as a look at these."""
    addresses: tuple[int, ...] = field(repr=False)

    def holds_for(self, model: nn.Module | None) -> bool:
        """Whether no memory of the model has moved; checked before every sync, while nobody generates."""
        return model is self.model and self.addresses == addresses_in(self.held)


def learn_layout(model: nn.Module | None, specs: Sequence[Spec]) -> WeightLayout:
    """The layout of all tensors of a checkpoint. The model stays as it is. Errors: ``LayoutUnknown``."""
    assert model is not None
    before = {name: tensor.data for name, tensor in model.named_parameters()}
    held = holders_in(model)
    addresses = addresses_in(held)
    trace = trace_load(model, specs)
    if addresses_in(holders_in(model)) != addresses:
        for name, tensor in model.named_parameters():
            tensor.data = before[name]
        raise _refused("vLLM's loader puts other memory in the place of weights")
    check_covered(model, trace)
    by_name = {spec.name: _location_of(trace, spec) for spec in specs}
    return WeightLayout(by_name=by_name, fills=tuple(trace.fills), model=model, held=held, addresses=addresses)


def holders_in(model: nn.Module) -> tuple[Mapping[str, torch.Tensor | None], ...]:
    """The modules' own dictionaries of parameters and buffers, which also show what takes a tensor's place later."""
    return tuple(tensors for module in model.modules() for tensors in (module._parameters, module._buffers) if tensors)


def addresses_in(held: Iterable[Mapping[str, torch.Tensor | None]]) -> tuple[int, ...]:
    """Addresses of all tensors. Through torch's dispatch, vLLM's own kinds of parameters take 20 times as long."""
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(tensor.data_ptr() for tensors in held for tensor in tensors.values() if tensor is not None)


def _location_of(trace: LoadTrace, spec: Spec) -> Location:
    copies = trace.copies.get(spec.name, [])
    if spec.name in trace.changed:
        return Location(by_loader=True)
    dtype, shape = spec.kind
    whole = _joined(copies, torch.Size(shape).numel(), dtype)
    return Location(copies=tuple(copies)) if whole is None else Location(whole=whole)


def _joined(copies: Sequence[Copy], length: int, dtype: torch.dtype) -> torch.Tensor | None:
    """[length] the memory that all copies together write in order, if it is one run in one storage."""
    parts = sorted(copies, key=lambda copy: copy.offset)
    if not parts or not all(_is_plain(copy, dtype) for copy in parts):
        return None
    ends = [copy.offset + copy.target.numel() for copy in parts]
    first = parts[0].target
    follows = all(
        second.offset == end
        and storage_of(second.target) == storage_of(first)
        and second.target.storage_offset() == one.target.storage_offset() + one.target.numel()
        for (one, second), end in zip(pairwise(parts), ends, strict=False)
    )
    if not follows or parts[0].offset or ends[-1] != length:
        return None
    flat = torch.empty(0, dtype=dtype, device=first.device)
    return flat.set_(first.untyped_storage(), first.storage_offset(), (length,), (1,))


def _is_plain(copy: Copy, dtype: torch.dtype) -> bool:
    source = torch.empty_strided(copy.shape, copy.strides, device="meta")
    return copy.target.dtype == dtype and source.is_contiguous() and copy.target.is_contiguous()


def check_covered(model: nn.Module, trace: LoadTrace) -> None:
    """Every byte of every parameter is written exactly once. Errors: ``LayoutUnknown``."""
    written: dict[int, list[Extent]] = {}
    for target in _targets(trace):
        written.setdefault(storage_of(target), []).append(_extent_of(target))
    runs = {storage: np.concatenate(extents) for storage, extents in written.items()}
    for storage, found in runs.items():
        runs[storage] = found[np.argsort(found[:, 0], kind="stable")]
    for name, weight in model.named_parameters():
        _check_one(name, _extent_of(weight.data), runs.get(storage_of(weight), np.zeros((0, 2), dtype=np.int64)))


def _targets(trace: LoadTrace) -> Iterator[torch.Tensor]:
    """Every view that is written; one that several tensors together make counts once."""
    for copies in trace.copies.values():
        yield from (copy.target for copy in copies)
    yield from {id(target): target for targets in trace.changed.values() for target in targets}.values()
    yield from (target for target, _ in trace.fills)


def _check_one(name: str, wanted: Extent, written: Extent) -> None:
    for first, end in wanted:
        inside = written[(written[:, 0] < end) & (written[:, 1] > first)]
        starts, ends = inside[:, 0], inside[:, 1]
        if (starts[1:] < ends[:-1]).any():
            raise _refused("vLLM's loader writes a part of it twice", name)
        reached = np.concatenate([[first], ends])
        if (starts > reached[:-1]).any() or reached[-1] < end:
            raise _refused("no tensor of the checkpoint brings a part of it", name)


def _extent_of(view: torch.Tensor) -> Extent:
    """The runs of bytes of a view, in order.

    >>> _extent_of(torch.zeros(3, 4, dtype=torch.int8)[1:, :2]).tolist()
    [[4, 6], [8, 10]]
    """
    size = view.element_size()
    sides = sorted(zip(view.stride(), view.shape, strict=True), reverse=True)
    length = 1
    while sides and (sides[-1][0] == length or sides[-1][1] == 1):
        length *= sides.pop()[1]
    starts: NDArray[np.int64] = np.array([view.storage_offset()], dtype=np.int64)
    for stride, num in sides:
        starts = (starts[:, None] + np.arange(num, dtype=np.int64) * stride).reshape(-1)
    if view.numel() == 0:
        starts = starts[:0]
    return np.stack([starts, starts + length], axis=1) * size


def _refused(problem: str, name: str = "layout") -> LayoutUnknown:
    return LayoutUnknown(problem, key=name, remedy="Sync by gloo, which leaves all to vLLM's own loader.")


@torch.no_grad()
def write_tensors(model: nn.Module, layout: WeightLayout, tensors: Mapping[str, torch.Tensor]) -> None:
    """All tensors, wherever they go. Errors: ``weights-broken``."""
    for name, tensor in tensors.items():
        write_parts(layout.by_name[name], tensor)
        whole = layout.by_name[name].whole
        if whole is not None and whole.data_ptr() != tensor.data_ptr():  # else it was made there
            whole.copy_(tensor.reshape(-1))
    load_changed(model, layout, tensors)
    fill_padding(layout)


def write_parts(location: Location, tensor: torch.Tensor) -> None:
    """The parts that are copied; a tensor that goes elsewhere as a whole has none."""
    for copy in location.copies:
        copy.target.copy_(tensor.contiguous().as_strided(copy.shape, copy.strides, copy.offset))


def load_changed(model: nn.Module | None, layout: WeightLayout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Those that vLLM's loader changes on the way. Errors: ``weights-broken``."""
    changed = {name: tensor for name, tensor in tensors.items() if layout.by_name[name].by_loader}
    if changed and model is not None:
        load_by(model.load_weights, changed)


def fill_padding(layout: WeightLayout) -> None:
    """What no tensor brings."""
    for target, value in layout.fills:
        target.fill_(value)
