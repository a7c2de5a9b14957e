"""Adapters merged into the served model itself: a weight after the other, so that no second model needs to fit."""

from typing import Any

import torch

from rollmatch.wire.digest import bytes_of
from rollmatch.wire.mixed_digest import add_mixed, mixed_digests
from rollmatch.wire.worker.frozen_weights import FrozenWeights
from rollmatch.wire.worker.in_place import InPlaceReceiver
from rollmatch.wire.worker.merging import AdapterMisfit, check_merged, merge_adapter
from rollmatch.wire.worker.writing import write_tensors


@torch.no_grad()
def merge_in_place(receiver: InPlaceReceiver, plan: dict[str, Any], base: FrozenWeights, model: Any) -> dict[str, Any]:
    """Write merged weights, and the base's where something else is. Returns the digests of all that was merged.

    Errors: ``AdapterMisfit``, ``DigestMismatch``, ``PlacesUnknown``; the model may then hold a mixture.
    """
    parts, merges = receiver.take(), plan["merges"]
    receiver.learn(plan["model"])
    names = [merge["name"] for merge in merges]
    receiver.served.is_whole = False
    with receiver.group.on_device():
        for name in base.names_to_restore((spec[0] for spec in plan["model"]), names):
            write_tensors(model, receiver.places, {name: base.read(name).to(base.device)})
        base.changed = set(names)
        sums = torch.zeros(len(merges), 2, dtype=torch.int64, device=base.device)
        for place, merge in enumerate(merges):
            merged = _merged(base, parts, merge)
            write_tensors(model, receiver.places, {merge["name"]: merged})
            add_mixed([bytes_of(merged)], sums[place : place + 1])
        digests = dict(zip(names, (digest.hex() for digest in mixed_digests(sums)), strict=True))
    check_merged(digests, plan.get("merged_digests"))
    receiver.served.is_whole = True
    return {"digests": digests}


def _merged(base: FrozenWeights, parts: Any, merge: dict[str, Any]) -> torch.Tensor:
    try:
        return merge_adapter(base.take(merge["name"]), parts, merge)
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
        raise AdapterMisfit(problem, key=merge["name"], remedy="Send the adapter of this model.") from error
