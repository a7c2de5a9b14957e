"""Receives weights straight into vLLM's parameters, which nobody may use meanwhile; adapters are merged into them.

Weights that are staged come into memory beside them, while the engine generates, and are copied from there. A model
that vLLM quantizes has no memory for what is sent: all of it comes beside, and is quantized from there.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor, nn

from rollmatch.errors import SyncError
from rollmatch.weights.digest import add_mixed, add_mixed_in, bytes_of, mixed_digests
from rollmatch.weights.finite import check_totals, totals_of
from rollmatch.weights.group_address import GroupAddress, bind
from rollmatch.weights.nccl import MERGE_LIMIT_S, DirectGroup, failing, open_direct
from rollmatch.weights.plan import Spec
from rollmatch.weights.transfer_plan import MergePlan, TransferPlan
from rollmatch.weights.worker.merging import FrozenWeights, check_merged, merge_in_place
from rollmatch.weights.worker.receiver import Received, Receiver, SyncDropped, check_announced, load_by, wait_go
from rollmatch.weights.worker.weight_layout import (
    Location,
    WeightLayout,
    fill_padding,
    learn_layout,
    load_changed,
    write_parts,
    write_tensors,
)

_NOWHERE = Location()


@dataclass(slots=True)
class Served:
    """What an engine generates with, also when its group is gone."""

    is_whole: bool = True
    """Whether the model holds the weights of one version."""


class InPlaceReceiver(Receiver):
    """As ``Receiver``; what a full sync brings in place is in the model as soon as it is received."""

    def __init__(self) -> None:
        super().__init__()
        self.served = Served()
        self.base: FrozenWeights | None = None
        """What adapters are merged into; given before one is announced."""
        self._model: nn.Module | None = None
        self._layout: WeightLayout | None = None
        self._specs: list[Spec] = []
        self._learnt_from: Sequence[Spec] | None = None

    @classmethod
    def start_in(cls, model: nn.Module, served: Served, address: GroupAddress, *, device: torch.device) -> Self:
        """Bind the port if this is rank 0, and begin to join. Errors: ``GroupPortInUse``."""
        listener = bind(address.host, address.port) if address.rank == 0 else None
        receiver = cls.joining(lambda: open_direct(address, device, listener=listener))
        receiver._model, receiver.served = model, served
        return receiver

    def begin(self, plan: TransferPlan) -> None:
        """As ``Receiver``, once it is known where everything goes. Errors also: ``LayoutUnknown``."""
        if self.reload is None:
            self._learn_of(plan)
        super().begin(plan)

    def _learn_of(self, plan: TransferPlan) -> None:
        if plan.merge is not None:
            self.learn(plan.merge.model)
        elif not (plan.tensors is self._learnt_from and self.layout.holds_for(self._model)):
            self.learn([spec for spec in plan.tensors if spec.name not in plan.aliases])
            self._learnt_from = plan.tensors

    @property
    def group(self) -> DirectGroup:
        """Once it has been joined."""
        assert isinstance(self._group, DirectGroup)
        return self._group

    @property
    def layout(self) -> WeightLayout:
        """Once it is known."""
        assert self._layout is not None
        return self._layout

    def learn(self, specs: Sequence[Spec]) -> None:
        """Where these tensors, which are all of the model's, live. Errors: ``LayoutUnknown``."""
        if self._layout is None or self._specs != list(specs) or not self._layout.holds_for(self._model):
            self._layout, self._specs = learn_layout(self._model, specs), list(specs)

    def _receive(self, plan: TransferPlan, received: Received) -> None:
        assert plan.sync_id is not None
        stays_beside = not plan.in_place or self.reload is not None
        beside = self._make_room(plan.tensors) if stays_beside else None  # while a refusal costs nobody anything
        wait_go(self.group.store, plan.sync_id)
        with failing(f"rank {self.group.rank}"), self.group.on_device(), torch.no_grad():
            if beside is not None:
                self._receive_buckets(plan, received, beside=beside)
                if plan.in_place:
                    self._load(self._model, beside, aliases=plan.aliases)
                else:
                    received.tensors |= beside
                return
            if plan.merge is not None:
                self._merge(plan.merge, self._receive_adapter(plan, received), received)
            else:
                self.served.is_whole = False
                load_changed(self._model, self.layout, self._receive_buckets(plan, received))
                fill_padding(self.layout)
                self.group.finish()
            self.served.is_whole = True

    def load_into(self, model: nn.Module, *, aliases: Collection[str] = ()) -> None:
        """Copy what was staged into the model. Errors: as ``Receiver``, ``TransferFailed``."""
        with failing(f"rank {self.group.rank}"):  # else the server would not know that the model holds a mixture
            self._load(model, self.take(), aliases=aliases)

    def _load(self, model: nn.Module | None, tensors: Mapping[str, Tensor], *, aliases: Collection[str]) -> None:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in aliases}
        self.served.is_whole = False
        if self.reload is None:
            assert model is not None
            write_tensors(model, self.layout, tensors)
        else:
            load_by(self.reload, tensors)
        self.group.finish()
        self.served.is_whole = True

    def _make_room(self, specs: Sequence[Spec]) -> dict[str, Tensor]:
        """Memory for all tensors, beside those of the model. Errors: ``no-room-to-stage``."""
        try:
            return {spec.name: self.group.scratch(spec.shape, spec.kind[0]) for spec in specs}
        except torch.OutOfMemoryError as error:
            problem = f"no room for {sum(spec.num_bytes for spec in specs) / 1e9:.3g} GB beside the served weights"
            other = ", or set sync.stage to false" if self.reload is None else ""
            remedy = f"Lower the server's vllm_gpu_memory_utilization{other}."
            raise SyncError(problem, code="no-room-to-stage", key="commit", remedy=remedy) from error

    def _receive_adapter(self, plan: TransferPlan, received: Received) -> dict[str, Tensor]:
        """A broadcast for each bucket, whose tensors have one type, then the learner's digests.

        The model stays as it is.
        """
        group, sums = self.group, self._new_sums(len(plan.tensors))
        group.follow()
        found, first, totals = dict[str, Tensor](), 0, list[Tensor]()
        for num_tensors in plan.buckets:
            specs = plan.tensors[first : first + num_tensors]
            lengths = [prod(spec.shape) for spec in specs]
            flat = group.scratch((sum(lengths),), specs[0].kind[0])
            group.broadcast_group([flat])
            with group.working():
                add_mixed_in(flat, [spec.num_bytes for spec in specs], sums[0, first : first + num_tensors])
                totals.append(totals_of(torch.split(flat, lengths)))
            parts = zip(specs, torch.split(flat, lengths), strict=True)
            found |= {spec.name: part.view(spec.shape) for spec, part in parts}
            first += num_tensors
        names = [spec.name for spec in plan.tensors]
        check_announced(names, self._announced_of(names, sums, received), received)
        check_totals(names, torch.cat(totals))
        return found

    def _merge(self, plan: MergePlan, adapter: Mapping[str, Tensor], received: Received) -> None:
        """Into the model, while the learner makes its own merge, whose digests come last."""
        assert self.base is not None
        self.served.is_whole = False
        sums = self._new_sums(len(plan.merges))
        self.group.follow()
        with self.group.working():
            totals = merge_in_place(self.layout, plan, adapter, self.base, sums=sums[0])
        names = [merge.name for merge in plan.merges]
        announced = self._announced_of(names, sums, received, limit_s=MERGE_LIMIT_S)  # others may still merge
        wanted = dict(zip(names, announced, strict=True))
        check_merged(received.digests, wanted | dict(plan.merged_digests or {}))
        check_totals(names, totals)

    def _new_sums(self, number: int) -> Tensor:
        """[2, number, 2] of what is here, and as the learner has it."""
        return torch.zeros(2, number, 2, dtype=torch.int64, device=self.group.device)

    def _announced_of(
        self, names: Sequence[str], sums: Tensor, received: Received, *, limit_s: float | None = None
    ) -> list[str]:
        """The learner's digests, which come now; ours are noted. Errors: ``SyncDropped``, ``TransferFailed``."""
        self.group.broadcast_group([sums[1]])
        self.group.wait(self.group.mark(), lambda: _check_wanted(received), limit_s=limit_s)
        ours, announced = ([digest.hex() for digest in mixed_digests(part)] for part in sums.cpu())
        received.digests |= zip(names, ours, strict=True)
        return announced

    def _receive_buckets(
        self, plan: TransferPlan, received: Received, *, beside: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Every bucket, then the learner's digests; into the model, or ``beside`` it.

        Returns what is in neither by now. Errors: ``WeightsNotFinite``; the model then holds a mixture, unless
        ``beside`` was given.
        """
        group, specs = self.group, plan.tensors
        sums = self._new_sums(len(specs))
        group.follow()
        kept, totals = dict[str, Tensor](), list[Tensor]()
        points, first = [group.mark()], 0
        for num_tensors in plan.buckets:
            bucket = specs[first : first + num_tensors]
            memory = [self._memory_for(spec) if beside is None else beside[spec.name] for spec in bucket]
            group.broadcast_group(memory)
            with group.working():
                add_mixed([bytes_of(part) for part in memory], sums[0, first : first + num_tensors])
                totals.append(totals_of(memory))
                kept |= self._store(bucket, memory) if beside is None else {}
            first += num_tensors
            points.append(group.mark())
            if beside is None and any(self._location_of(spec.name).whole is None for spec in bucket):
                group.wait(points[-2], lambda: _check_wanted(received))  # or scratch memory would pile up
        names = [spec.name for spec in specs]
        check_announced(names, self._announced_of(names, sums, received), received)
        check_totals(names, torch.cat(totals))
        return kept

    def _location_of(self, name: str) -> Location:
        return self.layout.by_name.get(name, _NOWHERE)

    def _memory_for(self, spec: Spec) -> Tensor:
        """Where a broadcast ends: in the model, or in scratch memory."""
        whole = self._location_of(spec.name).whole
        dtype, shape = spec.kind
        return self.group.scratch(shape, dtype) if whole is None else whole

    def _store(self, bucket: Sequence[Spec], memory: Sequence[Tensor]) -> dict[str, Tensor]:
        """Copy parts to where they go; returns what is to be kept, by name."""
        kept = {}
        for spec, tensor in zip(bucket, memory, strict=True):
            location = self._location_of(spec.name)
            write_parts(location, tensor)
            if location.by_loader:
                kept[spec.name] = tensor
        return kept


def _check_wanted(received: Received) -> None:
    """Errors: ``SyncDropped``, where somebody has dropped the sync."""
    if received.dropped:
        raise SyncDropped("it was dropped while it ran")
