"""What one sync carries, as the runs of bytes that travel: bucket after bucket, then the digests of all tensors."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from rollmatch.weights.bucket import Buffer
from rollmatch.weights.digest import bytes_of, digest_of_bytes
from rollmatch.weights.flight import MAX_IN_FLIGHT, broadcast_all
from rollmatch.weights.gloo_group import GlooGroup
from rollmatch.weights.plan import Plan


class Shipment:
    """Tensors of a plan on their way by gloo. Made and eaten by ``dialects.native.sender``, carried once."""

    def __init__(self, plan: Plan, tensors: Sequence[Tensor], *, adapter: Mapping[str, Any] | None = None) -> None:
        """``tensors`` as the learner lists them; the plan tells their order and types on the way."""
        self.plan, self.adapter = plan, adapter
        self.tensors = tuple(tensors[place] for place in plan.order)
        self.digests: tuple[str, ...] = ()
        """[len(plan.specs)] known when the last piece has been taken."""

    def carry(self, group: GlooGroup, buffers: Sequence[Buffer]) -> None:
        """Broadcast every piece from the last rank. Errors: ``TransferFailed``."""
        broadcast_all(self.pieces(buffers), partial(group.begin, source=group.address.world_size - 1))

    def pieces(self, buffers: Sequence[Buffer]) -> Iterator[Tensor]:
        """Raw bytes of each bucket, and last of all digests, each made just before its bytes go, while others travel.

        Each of the ``buffers`` is filled again after the others; so a piece is whole while one less of them are under
        way. What is hashed is what is sent: a tensor that changes on its way does not arrive unnoticed.
        """
        assert len(buffers) > MAX_IN_FLIGHT
        memory = cycle(buffers)
        digests: list[bytes] = []
        for bucket in self.plan.buckets:
            parts = self._bytes(bucket.start, bucket.stop)
            digests += [digest_of_bytes(part) for part in parts]
            yield next(memory).fill(parts)
        self.digests = tuple(digest.hex() for digest in digests)
        yield torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)

    @torch.no_grad()
    def _bytes(self, start: int, stop: int) -> list[Tensor]:
        """Of each tensor, in the type in which it travels."""
        pairs = zip(self.tensors[start:stop], self.plan.specs[start:stop], strict=True)
        return [bytes_of(tensor.to("cpu", getattr(torch, spec.dtype))) for tensor, spec in pairs]
