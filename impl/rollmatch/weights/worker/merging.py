"""Adapters merged on the server, in the order of operations that the learner's own merge has.

What is served afterwards equals the learner's merge bit for bit; digests prove it. Every other weight is the base that
the server was started with, read from the model directory again where something else had been loaded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rollmatch.errors import SyncError
from rollmatch.model.merge import Parts, merge_weight
from rollmatch.weights.digest import digest_of
from rollmatch.weights.worker.receiver import DigestMismatch, Receiver


class AdapterMisfit(SyncError):
    """An adapter's tensors fit the weight they change."""

    code = "adapter-invalid"
    status = 400


def merge_received(receiver: Receiver, plan: dict[str, Any], *, model_runner: Any) -> dict[str, Any]:
    """Replace the received adapter by the whole model: merged weights, and the base for the rest.

    Errors: ``AdapterMisfit``, ``DigestMismatch``.
    """
    parts = receiver.take()
    config = model_runner.model_config
    base = read_base(config.model, dtype=config.dtype)
    merged = {}
    for merge in plan["merges"]:
        merged[merge["name"]] = merge_named(merge, base[merge["name"]], parts)
    digests = {name: digest_of(tensor).hex() for name, tensor in merged.items()}
    check_merged(digests, plan.get("merged_digests"))
    receiver.put_back(base | merged)
    return {"digests": digests}


def read_base(directory: str, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of a model directory; floating ones in ``dtype``."""
    tensors = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                tensor = file.get_tensor(name)
                tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return tensors


def merge_named(
    merge: Mapping[str, Any],
    weight: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A weight with the adapter of which a merge names the tensors; ``out`` as ``merge_weight``.

    Errors: ``AdapterMisfit``, ``KeyError``.
    """
    magnitude = None if merge["magnitude"] is None else tensors[merge["magnitude"]]
    lora_a, lora_b = tensors[merge["lora_a"]], tensors[merge["lora_b"]]
    parts = Parts(lora_a=lora_a, lora_b=lora_b, magnitude=magnitude, scaling=merge["scaling"])
    try:
        return merge_weight(weight, parts, out=out)
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
        raise AdapterMisfit(problem, key=merge["name"], remedy="Send the adapter of this model.") from error


def check_merged(digests: dict[str, str], wanted: dict[str, str] | None) -> None:
    for name, digest in (wanted or {}).items():
        if digests.get(name) != digest:
            problem = f"merged with digest {digests.get(name)}, the learner's merge has {digest}"
            raise DigestMismatch(problem, key=name, remedy="Send full weights.")
