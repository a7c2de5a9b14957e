"""Adapters merged into the served model itself: a weight after the other, so that no second model needs to fit."""

from typing import Any

import torch

from rollmatch.weights.digest import bytes_of
from rollmatch.weights.mixed_digest import add_mixed, mixed_digests
from rollmatch.weights.worker.frozen_weights import FrozenWeights
from rollmatch.weights.worker.in_place import InPlaceReceiver
from rollmatch.weights.worker.merging import check_merged, merge_named
from rollmatch.weights.worker.places import Places
from rollmatch.weights.worker.writing import write_tensors

_AT_ONCE = 16
"""Weights whose digests are made in one launch, and which may stand beside the model until then."""


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
        for start in range(0, len(merges), _AT_ONCE):
            some = merges[start : start + _AT_ONCE]
            merged = {merge["name"]: _merged(base, parts, merge, receiver.places) for merge in some}
            write_tensors(model, receiver.places, merged)
            add_mixed([bytes_of(tensor) for tensor in merged.values()], sums[start : start + len(some)])
        digests = dict(zip(names, (digest.hex() for digest in mixed_digests(sums)), strict=True))
    check_merged(digests, plan.get("merged_digests"))
    receiver.served.is_whole = True
    return {"digests": digests}


def _merged(base: FrozenWeights, parts: Any, merge: dict[str, Any], places: Places) -> torch.Tensor:
    """In the model already, where it lies there as one run."""
    weight, whole = base.take(merge["name"]), places.by_name[merge["name"]].whole
    out = whole.view(weight.shape) if whole is not None and whole.dtype == weight.dtype else None
    return merge_named(merge, weight, parts, out=out)
