"""An adapter alone for servers of the swift dialect, as ms-swift sends it. Source: 4.6 ``rollout_mixin.py``."""

from torch import Tensor

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
    """What of peft's ``LoraConfig`` a server needs; its scaling is 1, because ``named_parts`` applies the true one.

    Errors: ``AdapterNotSendable``.
    """
    tensors = dict(adapter.tensors)
    ranks = sorted({len(tensors[merge.lora_a]) for merge in adapter.merges})
    if len(ranks) > 1:
        problem = f"layers have ranks {ranks[0]} to {ranks[-1]}, and the swift dialect names one"
        raise AdapterNotSendable(problem, key="tuner.lora_rank", remedy=_FULL, code="adapter-incomplete")
    if any(merge.magnitude is not None for merge in adapter.merges):
        problem = "is true, and vLLM applies no DoRA: the server would answer 200 and keep what it has"
        raise AdapterNotSendable(problem, key="tuner.use_dora", remedy=_FULL, code="adapter-incomplete")
    modules = sorted({merge.lora_a.rsplit(".lora_A", 1)[0].rsplit(".", 1)[-1] for merge in adapter.merges})
    return {"peft_type": "LORA", "r": ranks[0], "lora_alpha": ranks[0], "target_modules": modules, "bias": "none"}


def named_parts(adapter: Adapter) -> list[tuple[str, Tensor]]:
    """(peft's name, tensor); the scaling is part of B, as vLLM itself makes it when it loads an adapter."""
    tensors = dict(adapter.tensors)
    return [pair for merge in adapter.merges for pair in _parts_of(merge, tensors)]


def _parts_of(merge: Merge, tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    lora_a, lora_b = tensors[merge.lora_a], tensors[merge.lora_b]
    return [(_PREFIX + merge.lora_a, lora_a), (_PREFIX + merge.lora_b, lora_b * merge.scaling)]
