"""Adapters merged on the server, in the order of operations that the learner's own merge has.

What is served afterwards equals the learner's merge bit for bit; digests prove it. Every other weight is the base that
the server was started with, read from the model directory again where something else had been loaded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn import functional

from rollmatch.errors import SyncError
from rollmatch.wire.digest import digest_of
from rollmatch.wire.worker.receiver import DigestMismatch, Receiver


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
        weight = base[merge["name"]]
        try:
            merged[merge["name"]] = merge_adapter(weight, parts, merge)
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
            raise AdapterMisfit(problem, key=merge["name"], remedy="Send the adapter of this model.") from error
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


@torch.no_grad()
def merge_adapter(weight: torch.Tensor, parts: Mapping[str, torch.Tensor], merge: Mapping[str, Any]) -> torch.Tensor:
    """A weight with its LoRA, or DoRA where there is a magnitude. Source: peft 0.20 ``tuners/lora``.

    >>> parts = {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([[1.0], [0.0]])}
    >>> merge_adapter(torch.zeros(2, 2), parts, {"lora_a": "a", "lora_b": "b", "magnitude": None, "scaling": 0.5})
    tensor([[0.5000, 1.0000],
            [0.0000, 0.0000]])
    """
    delta = _delta(weight, parts[merge["lora_a"]], parts[merge["lora_b"]], merge["scaling"])
    if merge["magnitude"] is None:
        return (weight + delta).to(weight.dtype)
    return _with_magnitude(weight, delta, parts[merge["magnitude"]])


def _delta(weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Half precision is multiplied in float32 on a CPU, as peft does."""
    dtype = lora_b.dtype
    if lora_b.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
        lora_a, lora_b = lora_a.float(), lora_b.float()
    if weight.dim() > 2:
        convolve = {4: functional.conv2d, 5: functional.conv3d}[weight.dim()]
        product = convolve(lora_a.transpose(0, 1), lora_b).transpose(0, 1)
    else:
        product = lora_b @ lora_a
    return (product * scaling).to(dtype)


def _with_magnitude(weight: torch.Tensor, delta: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    summed = weight + delta
    if weight.dim() > 2:
        norm: torch.Tensor = summed.norm(p=2, dim=tuple(range(1, summed.dim())), keepdim=True).transpose(1, 0)
        factor = (magnitude / norm).view(-1, *[1] * (weight.dim() - 1))
    else:
        factor = (magnitude / torch.linalg.norm(summed, dim=1).to(summed.dtype)).view(-1, 1)
    return (factor * summed).to(weight.dtype)


def check_merged(digests: dict[str, str], wanted: dict[str, str] | None) -> None:
    for name, digest in (wanted or {}).items():
        if digests.get(name) != digest:
            problem = f"merged with digest {digests.get(name)}, the learner's merge has {digest}"
            raise DigestMismatch(problem, key=name, remedy="Send full weights.")
