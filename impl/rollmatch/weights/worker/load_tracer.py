"""Load tracer: what vLLM's loader does with each tensor, on placeholders without numbers; nothing is written."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollmatch.errors import SyncError, kind_and_text
from rollmatch.weights.plan import Spec

aten = torch.ops.aten


class LayoutUnknown(SyncError):
    """What a loader does is no set of copies that write every parameter exactly once."""

    code = "places-unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Numbers of one announced tensor that go unchanged into a model's memory."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements of the announced tensor, which is contiguous."""
    target: torch.Tensor
    """A view of a parameter or buffer."""


@dataclass(slots=True)
class LoadTrace:
    """Made by ``trace_load``, read by ``weight_layout``."""

    copies: dict[str, list[Copy]] = field(default_factory=dict)
    changed: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Name -> where it goes after being changed on the way, or together with others."""
    fills: list[tuple[torch.Tensor, float]] = field(default_factory=list)


def trace_load(model: nn.Module, specs: Iterable[Spec]) -> LoadTrace:
    """Run ``model.load_weights`` on placeholders of all tensors. Errors: ``LayoutUnknown``."""
    tracer = _LoadTracer(memory_of(model))
    load_weights: Any = model.load_weights
    try:
        with torch.no_grad(), tracer:
            load_weights((spec.name, tracer.placeholder(spec)) for spec in specs)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise _unknown(f"vLLM's loader: {kind_and_text(error)}") from error
    return tracer.trace


def memory_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers."""
    yield from model.parameters()
    yield from model.buffers()


def storage_of(tensor: torch.Tensor) -> int:
    """The same for all views of one memory."""
    return int(tensor.untyped_storage()._cdata)


class _LoadTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows placeholders by their storages through whatever a loader does."""

    def __init__(self, memory: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = LoadTrace()
        self._memory = {storage_of(tensor) for tensor in memory}
        self._names: dict[int, str] = {}
        self._made_of: dict[int, frozenset[str]] = {}
        self._kept: list[torch.Tensor] = []
        """So that no storage's address is used again."""

    def placeholder(self, spec: Spec) -> torch.Tensor:
        """A tensor without memory that stands for an announced one."""
        dtype, shape = spec.kind
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._kept.append(tensor)
        self._names[storage_of(tensor)] = spec.name
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        written = _written(func, args, kwargs)
        sources = self._sources(args, kwargs)
        if any(storage_of(tensor) in self._memory for tensor in written) or (sources and written):
            return self._write(func, args, written, sources)
        if sources and func is aten._local_scalar_dense.default:
            raise _unknown(f"vLLM's loader reads a number of {min(sources)}")
        if sources and "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        result = func(*args, **kwargs)
        for tensor in _tensors(result) if sources else ():
            if not self._made_from(tensor):
                self._mark(tensor, sources)
        return result

    def _write(self, func: Any, args: Any, written: Sequence[torch.Tensor], sources: frozenset[str]) -> Any:
        target = written[0]
        if func is aten.copy_.default and sources:
            self._copy(target, args[1], sources)
        elif func in (aten.fill_.Scalar, aten.zero_.default) and storage_of(target) in self._memory:
            self.trace.fills.append((target, float(args[1]) if len(args) > 1 else 0.0))
        else:
            raise _unknown(f"vLLM's loader changes a weight by {func}")
        return target

    def _copy(self, target: torch.Tensor, source: torch.Tensor, sources: frozenset[str]) -> None:
        name = self._names.get(storage_of(source))
        if storage_of(target) not in self._memory:
            self._mark(target, sources)
        elif name is None or target.shape != source.shape:
            for made_of in sources:
                self.trace.changed.setdefault(made_of, []).append(target)
        else:
            shape, strides = tuple(source.shape), source.stride()
            copy = Copy(offset=int(source.storage_offset()), shape=shape, strides=strides, target=target)
            self.trace.copies.setdefault(name, []).append(copy)

    def _mark(self, tensor: torch.Tensor, sources: frozenset[str]) -> None:
        self._kept.append(tensor)
        before = self._made_of.get(storage_of(tensor), frozenset())
        self._made_of[storage_of(tensor)] = before | sources

    def _made_from(self, tensor: torch.Tensor) -> frozenset[str]:
        storage = storage_of(tensor)
        name = self._names.get(storage)
        return self._made_of.get(storage, frozenset()) if name is None else frozenset([name])

    def _sources(self, *arguments: object) -> frozenset[str]:
        return frozenset().union(*(self._made_from(tensor) for tensor in _tensors(arguments)))


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation writes to."""
    formal = func._schema.arguments
    given = [(spec, args[at] if at < len(args) else kwargs.get(spec.name)) for at, spec in enumerate(formal)]
    changed = [value for spec, value in given if spec.alias_info is not None and spec.alias_info.is_write]
    return _tensors(changed)


def _unknown(problem: str) -> LayoutUnknown:
    return LayoutUnknown(problem, key="layout", remedy="Sync by gloo, or send adapters to be merged.")
