"""All weights of the policy by checkpoint name, whichever way the learner's ranks share them.

DDP: every rank has them all. FSDP2: shards are gathered for the time of the iteration, all units at once. DeepSpeed
ZeRO-3: gathered by DeepSpeed's own context. Every rank must iterate over sharded weights, because ranks wait for each
other in the gathers.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from rollmatch.model.checkpoint import merged_weights
from rollmatch.weights.adapter import Adapter, adapter_of


class NamedWeights:
    """Iterates over (checkpoint name, tensor), adapters merged.

    Tensors of a sharded model are copies, because what was gathered is gone when the iteration ends; others may be the
    policy's own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrap(model)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold parts, so that all of them must iterate."""
        is_split = any(isinstance(module, FSDPModule) for module in self.model.modules())
        return is_split or any(hasattr(weight, "ds_id") for weight in self.model.parameters())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        is_sharded = self.is_sharded
        with gathered(self.model):
            for name, weight in merged_weights(self.model):
                yield name, weight.clone() if is_sharded else weight

    def adapter(self) -> Adapter:
        """The adapter alone. Errors: ``AdapterMissing``, ``AdapterIncomplete``."""
        return adapter_of(self.model)


def unwrap(model: nn.Module) -> nn.Module:
    """The policy without what DDP or DeepSpeed put around it."""
    deepspeed: Any = sys.modules.get("deepspeed")
    wrappers = (DistributedDataParallel, *([deepspeed.DeepSpeedEngine] if deepspeed else []))
    return cast(nn.Module, model.module) if isinstance(model, wrappers) else model


def named_weights(model: nn.Module) -> NamedWeights:
    """The weights as they are when they are iterated over, not as they are now."""
    return NamedWeights(model)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Whole weights on every rank while this lasts; a model that is not sharded stays as it is."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                stack.callback(module.reshard)
        spread = [weight for weight in model.parameters() if hasattr(weight, "ds_id")]
        if spread:
            import deepspeed  # type: ignore[import-not-found, unused-ignore]

            stack.enter_context(deepspeed.zero.GatheredParameters(spread, modifier_rank=None))
        yield
