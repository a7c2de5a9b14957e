"""An adapter alone for servers of the swift dialect, as ms-swift sends it. Source: 4.6 ``rollout_mixin.py``."""

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from rollmatch.dialects.session import RolloutServer
from rollmatch.weights.named_weights import Adapter, AdapterNotSendable
from rollmatch.weights.plan import Merge

ADAPTER_ROUTE = "/update_adapter_flattened_param"
_PREFIX = "base_model.model."
_FULL = "Set sync.mode to full."


def takes_adapters(server: RolloutServer) -> bool:
    """Whether this is a server of the swift dialect with the route, whose engine was started for adapters."""
    if server.dialect.name != "swift" or ADAPTER_ROUTE not in server.routes:
        return False
    about = server.control("/get_engine_type")
    return isinstance(about, dict) and bool(about.get("enable_lora"))


def peft_config(adapter: Adapter) -> dict[str, object]:
    """What of peft's ``LoraConfig`` an engine needs; its scaling is 1, because ``named_parts`` applies the true one.

    Errors: ``AdapterNotSendable``.
    """
    if any(merge.magnitude is not None for merge in adapter.merges):
        problem = "is true, and vLLM applies no DoRA: an engine would keep what it has"
        raise AdapterNotSendable(problem, key="tuner.use_dora", remedy=_FULL, code="adapter-incomplete")
    modules = sorted({merge.lora_a.rsplit(".lora_A", 1)[0].rsplit(".", 1)[-1] for merge in adapter.merges})
    rank = _largest_rank(adapter)
    return {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}


def _largest_rank(adapter: Adapter) -> int:
    tensors = dict(adapter.tensors)
    return max(len(tensors[merge.lora_a]) for merge in adapter.merges)


def named_parts(adapter: Adapter) -> list[tuple[str, Tensor]]:
    """(peft's name, tensor), all of one rank, the largest: zeros fill the others.

    The scaling is part of B, as vLLM itself makes it when it loads an adapter.
    """
    tensors, rank = dict(adapter.tensors), _largest_rank(adapter)
    return [pair for merge in adapter.merges for pair in _parts_of(merge, tensors, rank)]


def _parts_of(merge: Merge, tensors: dict[str, Tensor], rank: int) -> list[tuple[str, Tensor]]:
    lora_a, lora_b = tensors[merge.lora_a], tensors[merge.lora_b] * merge.scaling
    missing = rank - len(lora_a)
    filled = pad(lora_a, (0, 0, 0, missing)), pad(lora_b, (0, missing))
    return [(_PREFIX + name, part) for name, part in zip((merge.lora_a, merge.lora_b), filled, strict=True)]


def without_effect(adapter: Adapter) -> Adapter:
    """An adapter of the same layers that changes nothing, of rank 1, which every engine for adapters takes."""
    tensors = {name: tensor[:1] * 0 for name, tensor in adapter.tensors}
    tensors |= {merge.lora_b: dict(adapter.tensors)[merge.lora_b][:, :1] * 0 for merge in adapter.merges}
    return replace(adapter, tensors=tuple(tensors.items()), merged=(), base=())
