"""A policy that learner ranks hold in parts: FSDP2's ``DTensor`` and DeepSpeed's ZeRO-3, gathered a few at a time.

Every forward pass gathers weights, so that all ranks run the same number of passes.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from rollmatch.errors import LaunchError

GATHER_BYTES = {"cpu": 2**20, "gpu": 2**28}
"""Of weights that one call gathers: a quarter of a bucket. A call for each takes longer."""


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of the weights.

    >>> is_sharded(nn.Linear(2, 2))
    False
    """
    if not torch.distributed.is_initialized():
        return False
    return any(
        isinstance(module, FSDPModule) or any(hasattr(weight, "ds_id") for weight in module._parameters.values())
        for module in model.modules()
    )


@torch.no_grad()
def whole(weight: Tensor) -> Tensor:
    """All of a weight, detached: a copy where ranks hold parts of it, which all of them then call for; else itself."""
    if isinstance(weight, DTensor):
        gathered_weight: Tensor = weight.full_tensor().detach()
        return gathered_weight
    if not hasattr(weight, "ds_id"):
        return weight.detach()
    with _deepspeed().zero.GatheredParameters([weight], modifier_rank=None):
        return weight.detach().clone()


@torch.no_grad()
def each_whole(weights: Iterable[tuple[Tensor, torch.dtype]], *, to_first: bool = False) -> Iterator[Tensor]:
    """``whole`` of one weight after the other, of which ``GATHER_BYTES`` are gathered at a time. All ranks iterate.

    Those that are gathered together come in the type beside them, which is that in which they travel; others in theirs.
    ``to_first``: they go to rank 0 alone, and tensors without memory (device ``meta``) stand for them on other ranks.
    """
    rows: _Rows | None = None
    for weight, dtype in weights:
        if rows and not rows.takes(weight, dtype):
            yield from rows.gather(to_first=to_first)
            rows = None
        if _is_split_by_rows(weight):
            rows = rows or _Rows(weight.device_mesh)
            rows.add(weight, dtype)
        else:
            yield whole(weight)
    yield from rows.gather(to_first=to_first) if rows else ()


def _is_split_by_rows(weight: Tensor) -> TypeGuard[DTensor]:
    return isinstance(weight, DTensor) and weight.placements == (Shard(0),)


class _Rows:
    """Weights of which each rank holds some rows; all that a rank holds goes to the others, or to the first, at once.

    Of n rows, each of W ranks holds ceil(n / W), the last ones fewer: with n = 5 and W = 4 these are 2, 2, 1 and 0, and
    the parts of 2 rows that arrive are 0 1, 2 3, 4 -, - -.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.weights: list[tuple[DTensor, torch.dtype]] = []
        self.sizes: list[int] = []
        """Bytes of each rank's part, those that are missing in the last ones included."""
        self._room = GATHER_BYTES["cpu" if mesh.device_type == "cpu" else "gpu"]

    def takes(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether this one can be gathered by the same call."""
        if not _is_split_by_rows(weight) or weight.numel() * dtype.itemsize > self._room:
            return False
        is_near = weight.device_mesh is self.weights[-1][0].device_mesh  # those of a layer; a comparison takes longer
        return is_near or weight.device_mesh == self.mesh

    def add(self, weight: DTensor, dtype: torch.dtype) -> None:
        """It is gathered by ``gather``."""
        num_rows, num_ranks = max(1, weight.shape[0]), self.mesh.size()
        self.weights.append((weight, dtype))
        self.sizes.append(-(-num_rows // num_ranks) * (weight.numel() // num_rows) * dtype.itemsize)
        self._room -= num_ranks * self.sizes[-1]

    def gather(self, *, to_first: bool) -> Iterator[Tensor]:
        """The whole weights, in the order in which they were added."""
        wholes = self._to_first() if to_first else self._to_all()
        while wholes:  # only what has not been yielded is kept
            yield wholes.pop(0)

    def _to_all(self) -> list[Tensor]:
        """By one all-gather of what each rank holds, as bytes."""
        held = list[Tensor]()
        for (weight, dtype), size in zip(self.weights, self.sizes, strict=True):
            mine = weight.to_local().to(dtype).reshape(-1).view(torch.uint8)
            held += [mine, mine.new_zeros(size - len(mine))]
        parts = _all_gathered(torch.cat(held), self.mesh.get_group()).view(self.mesh.size(), -1)
        wholes = zip(_taken_apart(parts, self.sizes), self.weights, strict=True)
        return [
            whole.view(-1)[: weight.numel() * dtype.itemsize].view(dtype).view(weight.shape)
            for whole, (weight, dtype) in wholes
        ]

    def _to_first(self) -> list[Tensor]:
        """Each rank sends its rows to the place that they have in the first rank's memory, without a copy."""
        group = self.mesh.get_group()
        transfer = partial(dist.P2POp, group=group)
        wholes, calls = [_empty_on_first(*pair, group) for pair in self.weights], list[dist.P2POp]()
        for (weight, dtype), rows_of_all in zip(self.weights, wholes, strict=True):
            mine = weight.to_local()
            if group.rank() > 0:
                rows = mine.to(dtype).contiguous()
                calls += [transfer(dist.isend, rows, group_peer=0)] if rows.shape[0] else []
                continue
            first, *others = torch.split(rows_of_all, max(1, mine.shape[0]))
            first.copy_(mine)
            calls += [transfer(dist.irecv, rows, group_peer=rank) for rank, rows in enumerate(others, 1)]
        for call in dist.batch_isend_irecv(calls) if calls else ():
            call.wait()
        return wholes


def _empty_on_first(weight: Tensor, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    """Memory for a whole weight on the first rank, none on others."""
    return torch.empty(weight.shape, dtype=dtype, device=weight.device if group.rank() == 0 else "meta")


def _all_gathered(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n] of each of W ranks -> [W * n], in their order."""
    parts = mine.new_empty(len(mine) * group.size())
    dist.all_gather_into_tensor(parts, mine, group=group)
    return parts


def _taken_apart(parts: Tensor, sizes: list[int]) -> list[Tensor]:
    """[W, n] -> a [W, size] of each size, in memory of its own where there are several.

    >>> [each.tolist() for each in _taken_apart(torch.arange(6).view(2, 3), [1, 2])]
    [[[0], [3]], [[1, 2], [4, 5]]]
    """
    if len(sizes) == 1:
        return [parts]
    wholes = [parts.new_empty(len(parts), size) for size in sizes]
    torch.split_with_sizes_copy(parts, sizes, dim=1, out=wholes)
    return wholes


def meta_of(weight: Tensor) -> Tensor:
    """A tensor without memory, of the type and the shape of the whole weight.

    >>> meta_of(torch.ones(2, 3, dtype=torch.bfloat16))
    tensor(..., device='meta', size=(2, 3), dtype=torch.bfloat16)
    """
    return torch.empty(shape_of(weight), dtype=weight.dtype, device="meta")


def shape_of(weight: Tensor) -> tuple[int, ...]:
    """Of the whole weight.

    >>> shape_of(torch.ones(2, 3))
    (2, 3)
    """
    return tuple(getattr(weight, "ds_shape", weight.shape))


def split_in(module: nn.Module) -> list[tuple[dict[str, Any], str, DTensor]]:
    """Weights of which ranks hold parts, each with the dictionary that holds it and its name there."""
    parts: list[dict[str, Any]] = [part._parameters for part in module.modules()]
    return [(part, name, weight) for part in parts for name, weight in part.items() if isinstance(weight, DTensor)]


@contextmanager
def gathered(module: nn.Module, wholes: Iterator[Tensor]) -> Iterator[None]:
    """Whole weights in a module while this lasts; all ranks call it. One that is not split stays as it is.

    ``wholes``: of those in ``split_in``, in that order. ZeRO-3 gathers its own.
    """
    spread = [weight for weight in module.parameters() if hasattr(weight, "ds_id")]
    split = split_in(module)
    for held, name, _ in split:
        held[name] = nn.Parameter(next(wholes), requires_grad=False)
    try:
        with _deepspeed().zero.GatheredParameters(spread, modifier_rank=None) if spread else nullcontext():
            yield
    finally:
        for held, name, weight in split:
            held[name] = weight


@contextmanager
def changeable(module: nn.Module) -> Iterator[None]:
    """Whole weights in a module while this lasts, where ZeRO-3 has split them; what rank 0 makes of them stays."""
    spread = [weight for weight in module.parameters() if hasattr(weight, "ds_id")]
    with _deepspeed().zero.GatheredParameters(spread, modifier_rank=0) if spread else nullcontext():
        yield


def gather_in_passes(model: nn.Module) -> nn.Module:
    """A model that does not learn; where ZeRO-3 has split it as it was read, each forward pass gathers its weights.

    transformers calls ``deepspeed.initialize`` for the policy alone.
    """
    if any(hasattr(weight, "ds_id") for weight in model.parameters()):
        is_bfloat16 = next(model.parameters()).dtype == torch.bfloat16
        settings = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": is_bfloat16}}
        _deepspeed().initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, **settings})
    return model


def check_split(model: nn.Module, strategy: str) -> None:
    """Errors: ``strategy-not-engaged``, where no rank holds less than all weights."""
    if not any(isinstance(weight, DTensor) for weight in model.parameters()):
        raise not_engaged(strategy)


def not_engaged(strategy: str) -> LaunchError:
    """The error for a strategy that the libraries left out without a word."""
    problem = f"accelerate did not engage {strategy}"
    remedy = "Start two learner ranks or more (--gpus 0,1, or torchrun); else set it to ddp."
    return LaunchError(problem, code="strategy-not-engaged", key="training.strategy", remedy=remedy)


@torch.no_grad()
def run_idle(model: nn.Module) -> None:
    """A forward pass of one token, for the passes of other ranks."""
    device = next(model.parameters()).device
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)


def _deepspeed() -> Any:
    return sys.modules["deepspeed"]
