"""How weights reach a stock ``vllm serve``: vLLM's own NCCL engine on GPUs, our gloo engine (a plug-in) without.

The learner is rank 0 and the source of one group with all workers of all servers. Sources: vLLM 0.26 and 0.32,
``distributed/weight_transfer/nccl_engine.py``, ``packed_tensor.py``.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from packaging.version import Version

from rollmatch.weights.gloo import CHAIN_PROTOCOL, GlooGroup
from rollmatch.weights.group_address import GroupAddress, TransferFailed, bind
from rollmatch.weights.plan import Plan, WeightTransfer
from rollmatch.weights.stateless import StatelessGroup

RANK = 0
PACKED = {"packed": True, "packed_buffer_size_bytes": 2**30, "packed_num_buffers": 2}
"""vLLM's defaults; both sides have to use the same."""
_PACKED_AT_INIT = Version("0.28")
"""First version that reads ``PACKED`` when a group is opened; older ones read it with each update."""


_Group = TypeVar("_Group", GlooGroup, StatelessGroup)


class StockTransport(ABC, Generic[_Group]):
    """One group, and what its calls say beside the tensors' names."""

    backend: str
    """Of ``vllm serve --weight-transfer-config``."""
    _group: _Group | None = None

    @abstractmethod
    def init_info(self, address: GroupAddress, rank_offset: int) -> dict[str, object]:
        """What a server's workers need to join."""

    @abstractmethod
    def update_info(self, plan: Plan) -> dict[str, object]:
        """What an update says beside names, dtypes and shapes."""

    @abstractmethod
    def open(self, address: GroupAddress) -> None:
        """Join, once the servers have been called. Errors: ``CommunicatorTimeout``."""

    @abstractmethod
    def send(self, transfer: WeightTransfer) -> None:
        """All tensors, in the plan's order. Errors: ``TransferFailed``."""

    def close(self) -> None:
        """Leave; what is in flight is aborted."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _open_group(self) -> _Group:
        """Errors: ``TransferFailed``, where none is open."""
        if self._group is None:
            raise TransferFailed("the group is closed", remedy="Sync again.")
        return self._group


class GlooTransport(StockTransport[GlooGroup]):
    """For servers that were started on a CPU with our plug-in."""

    backend = "rollmatch_gloo"

    def init_info(self, address: GroupAddress, rank_offset: int) -> dict[str, object]:
        """The plug-in's fields."""
        limits = {"timeout_s": address.timeout_s, "join_timeout_s": address.join_timeout_s}
        return {**_meeting(address, rank_offset), "secret": address.secret, "protocol": CHAIN_PROTOCOL, **limits}

    def update_info(self, plan: Plan) -> dict[str, object]:
        """Number of tensors of each broadcast."""
        return {"buckets": [bucket.stop - bucket.start for bucket in plan.buckets]}

    def open(self, address: GroupAddress) -> None:
        """Errors: ``CommunicatorTimeout``."""
        self._group = GlooGroup.open(address, source=RANK)

    def send(self, transfer: WeightTransfer) -> None:
        """Buckets, then their digests. Errors: ``TransferFailed``."""
        self._open_group().send(transfer)


class NcclTransport(StockTransport[StatelessGroup]):
    """For servers with GPUs: tensors packed by vLLM's own producer."""

    backend = "nccl"

    def __init__(self, device: torch.device, vllm_version: str) -> None:
        """``device``: this process's GPU, with its index."""
        self.device, self._at_init = device, Version(vllm_version) >= _PACKED_AT_INIT

    def init_info(self, address: GroupAddress, rank_offset: int) -> dict[str, object]:
        """vLLM's fields; an unknown one is a server error there."""
        return _meeting(address, rank_offset) | (PACKED if self._at_init else {})

    def update_info(self, plan: Plan) -> dict[str, object]:
        """How tensors are packed, for versions that request it now."""
        return {} if self._at_init else dict(PACKED)

    def open(self, address: GroupAddress) -> None:
        """Hold the store and join. Errors: ``CommunicatorTimeout``, ``GroupPortInUse``."""
        listener = bind(address.host, address.port)
        self._group = StatelessGroup(address, listener=listener, device=self.device, source=RANK)

    def send(self, transfer: WeightTransfer) -> None:
        """Buffers of 1 GiB, two in flight. Errors: ``TransferFailed``."""
        named = zip((spec.name for spec in transfer.plan.specs), transfer.tensors, strict=True)
        sizes = {"buffer_bytes": PACKED["packed_buffer_size_bytes"], "num_buffers": PACKED["packed_num_buffers"]}
        self._open_group().send_packed(named, **sizes)


def _meeting(address: GroupAddress, rank_offset: int) -> dict[str, object]:
    return {
        "master_address": address.host,
        "master_port": address.port,
        "rank_offset": rank_offset,
        "world_size": address.world_size,
    }
