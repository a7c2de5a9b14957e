"""Weights on their way straight into the servers' parameters: the learner's part, from its word to the digests."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollmatch.weights.digest import bytes_of
from rollmatch.weights.direct_group import DirectGroup
from rollmatch.weights.mixed_digest import add_mixed, mixed_digests
from rollmatch.weights.plan import Bucket, Plan

BUCKET_BYTES = 2**30
"""Digests of one bucket are made while the next one travels."""
TAIL_BYTES = 2**26
"""Those of the last one while nothing does."""


class DirectShipment:
    """Tensors of a plan; made and eaten by ``dialects.native.sender``, carried once."""

    def __init__(self, plan: Plan, tensors: Sequence[Tensor], *, adapter: Mapping[str, Any] | None = None) -> None:
        """``tensors`` as the learner lists them; the plan tells their order and types on the way."""
        self.plan, self.adapter = plan, adapter
        self.tensors = tuple(tensors[place] for place in plan.order)
        self.digests: tuple[str, ...] = ()
        """[len(plan.specs)] known when all has been carried."""

    @torch.no_grad()
    def carry(self, group: DirectGroup, check: Callable[[], None]) -> None:
        """Every bucket in one group of broadcasts, then the digests; ``check`` raises when a server has given up.

        Errors: ``TransferFailed``, those of ``check``.
        """
        with group.on_device():
            sums = torch.zeros(len(self.plan.specs), 2, dtype=torch.int64, device=group.device)
            kept: list[list[Tensor]] = []
            """Casts of one bucket stay until it has gone."""
            points: list[Any] = []
            for bucket in self.plan.buckets:
                parts = self._parts(bucket, group.device)
                group.follow()
                group.carry(parts)
                with group.working():
                    add_mixed([bytes_of(part) for part in parts], sums[bucket.start : bucket.stop])
                kept.append(parts)
                points.append(group.mark())
                if len(kept) > 2:
                    group.wait(points[-3], check)
                    kept[-3] = []
            group.follow(work=True)
            group.carry([sums])
            group.wait(group.mark(), check)
        self.digests = tuple(digest.hex() for digest in mixed_digests(sums))

    def _parts(self, bucket: Bucket, device: torch.device) -> list[Tensor]:
        """In the types in which they travel; the learner's own memory where nothing is to be changed."""
        places = range(bucket.start, bucket.stop)
        types = [getattr(torch, self.plan.specs[place].dtype) for place in places]
        pairs = zip(places, types, strict=True)
        return [self.tensors[place].detach().to(device, dtype).contiguous() for place, dtype in pairs]


def device_of(weights: Iterable[tuple[str, Any]]) -> torch.device:
    """Where a group of the learner is: on the GPU of its weights, else on the calling thread's, else on the CPU."""
    for _, tensor in weights:
        if tensor.device.type == "cuda":
            return torch.device(tensor.device)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def mixed_digests_of(tensors: Sequence[Tensor]) -> list[str]:
    """[n] digest of each tensor's bytes, in hexadecimal; all on one device."""
    if not tensors:
        return []
    sums = torch.zeros(len(tensors), 2, dtype=torch.int64, device=tensors[0].device)
    add_mixed([bytes_of(tensor) for tensor in tensors], sums)
    return [digest.hex() for digest in mixed_digests(sums)]
