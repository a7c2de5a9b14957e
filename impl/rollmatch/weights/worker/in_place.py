"""Receives weights straight into vLLM's parameters, which nobody may use meanwhile; adapters beside them."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from rollmatch.weights.digest import bytes_of
from rollmatch.weights.direct_group import DirectGroup, failing
from rollmatch.weights.gloo_group import GroupAddress, bind
from rollmatch.weights.mixed_digest import add_mixed, mixed_digests
from rollmatch.weights.worker.direct import open_direct
from rollmatch.weights.worker.places import Place, Places, learn_places, specs_of
from rollmatch.weights.worker.receiver import Receiver, SyncDropped, _Received, wait_go
from rollmatch.weights.worker.writing import fill_padding, load_changed, write_parts

_NOWHERE = Place()


@dataclass(slots=True)
class Served:
    """What an engine generates with, also when its group is gone."""

    is_whole: bool = True
    """Whether the model holds the weights of one version."""


class InPlaceReceiver(Receiver):
    """As ``Receiver``; what a full sync brings is in the model as soon as it is received."""

    def __init__(self) -> None:
        super().__init__()
        self.served = Served()
        self._model: Any = None
        self._places: Places | None = None
        self._specs: list[Any] = []
        self._learnt_from: list[Any] | None = None

    @classmethod
    def start_in(cls, model: Any, served: Served, address: GroupAddress, *, device: torch.device) -> Self:
        """Bind the port if this is rank 0, and begin to join. Errors: ``GroupPortInUse``."""
        listener: socket.socket | None = bind(address.host, address.port) if address.rank == 0 else None
        receiver = cls.joining(lambda: open_direct(address, device, listener=listener))
        receiver._model, receiver.served = model, served
        return receiver

    def begin(self, plan: dict[str, Any]) -> None:
        """As ``Receiver``, once it is known where everything goes. Errors also: ``PlacesUnknown``."""
        known = plan["tensors"] is self._learnt_from and self.places.hold_for(self._model)
        if not plan["beside"] and not known:
            self.learn([spec for spec in plan["tensors"] if spec[0] not in plan["aliases"]])
            self._learnt_from = plan["tensors"]
        plan.setdefault("specs", specs_of(plan["tensors"]))  # once for all syncs that are like this one
        super().begin(plan)

    @property
    def group(self) -> DirectGroup:
        """Once it has been joined."""
        assert isinstance(self._group, DirectGroup)
        return self._group

    @property
    def places(self) -> Places:
        """Once they are known."""
        assert self._places is not None
        return self._places

    def learn(self, tensors: Sequence[Any]) -> None:
        """Where these tensors, which are all of the model's, live. Errors: ``PlacesUnknown``."""
        if self._places is None or self._specs != tensors or not self._places.hold_for(self._model):
            self._places, self._specs = learn_places(self._model, specs_of(tensors)), list(tensors)

    def _receive(self, plan: dict[str, Any], received: _Received) -> None:
        wait_go(self.group, plan)
        with failing(f"rank {self.group.rank}"), self.group.on_device(), torch.no_grad():
            self.served.is_whole = self.served.is_whole and plan["beside"]
            brought = self._carry_all(plan, received)
            if plan["beside"]:
                received.tensors = brought
                return
            load_changed(self._model, self.places, brought)
            fill_padding(self.places)
            self.group.finish()
            self.served.is_whole = True

    def _carry_all(self, plan: dict[str, Any], received: _Received) -> dict[str, torch.Tensor]:
        """Every bucket, then the learner's digests. Returns what is not in the model by now."""
        group, specs = self.group, plan["specs"]
        sums = torch.zeros(2, len(specs), 2, dtype=torch.int64, device=group.device)
        group.follow()
        brought: dict[str, torch.Tensor] = {}
        points, first = [group.mark()], 0
        for num_tensors in plan["buckets"]:
            bucket = specs[first : first + num_tensors]
            memory = [self._memory_for(spec, plan) for spec in bucket]
            group.carry(memory)
            with group.working():
                add_mixed([bytes_of(part) for part in memory], sums[0, first : first + num_tensors])
                brought |= self._store(bucket, memory, plan)
            first += num_tensors
            points.append(group.mark())
            if any(self._place_of(spec[0], plan).whole is None for spec in bucket):
                group.wait(points[-2], lambda: _check_wanted(received))  # or scratch memory would pile up
        group.carry([sums[1]])
        group.wait(group.mark(), lambda: _check_wanted(received))
        ours, announced = (mixed_digests(part) for part in sums.cpu())
        names = [spec[0] for spec in specs]
        received.digests |= {name: digest.hex() for name, digest in zip(names, ours, strict=True)}
        self._check_digests(names, [digest.hex() for digest in announced], received)
        return brought

    def _place_of(self, name: str, plan: dict[str, Any]) -> Place:
        return _NOWHERE if plan["beside"] else self.places.by_name.get(name, _NOWHERE)

    def _memory_for(self, spec: Any, plan: dict[str, Any]) -> torch.Tensor:
        """Where a broadcast ends: in the model, or in scratch memory."""
        name, dtype, shape = spec
        whole = self._place_of(name, plan).whole
        if whole is not None:
            return whole
        return self.group.scratch(shape, dtype)

    def _store(self, bucket: Sequence[Any], memory: Sequence[torch.Tensor], plan: dict[str, Any]) -> dict[str, Any]:
        """Copy parts to where they go; what is to be kept, by name."""
        kept = {}
        for (name, _, _), tensor in zip(bucket, memory, strict=True):
            place = self._place_of(name, plan)
            write_parts(place, tensor)
            if place.by_loader or plan["beside"]:
                kept[name] = tensor
        return kept


def _check_wanted(received: _Received) -> None:
    """Raise where somebody has dropped the sync."""
    if received.dropped:
        raise SyncDropped("it was dropped while it ran")
