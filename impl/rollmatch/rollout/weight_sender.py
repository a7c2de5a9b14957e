"""Which way weights take to a set of servers."""

from collections.abc import Sequence

import torch

from rollmatch.dialects.native.group import Rendezvous
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.dialects.queued_sender import QueuedSender
from rollmatch.dialects.session import RolloutServer
from rollmatch.dialects.vllm.sender import StockSender
from rollmatch.errors import SyncError
from rollmatch.rollout.vllm_server import WeightSender


class DialectsMixed(SyncError):
    """All servers of a run take weights in the same way."""

    code = "dialects-mixed"


class WeightsNotTaken(SyncError):
    """The servers' dialect has a way for weights that this machine has, too."""

    code = "weights-not-taken"


def make_sender(servers: Sequence[RolloutServer], ports: Sequence[int], rendezvous: Rendezvous) -> WeightSender:
    """Rank 0's way to connected servers; ``ports`` are theirs, one each.

    Errors: ``DialectsMixed``, ``WeightsNotTaken``.
    """
    dialects = {server.dialect.name for server in servers}
    if len(dialects) > 1:
        named = ", ".join(f"{server.base_url} speaks {server.dialect.name}" for server in servers)
        raise DialectsMixed(named, key=servers[0].base_url, remedy="Start the same kind of server everywhere.")
    if dialects == {"native"}:
        return NativeSender(servers, rendezvous)
    if dialects <= {"swift", "trl"}:
        return QueuedSender(servers, ports, rendezvous)
    if torch.cuda.is_available():
        raise WeightsNotTaken(
            f"{servers[0].base_url} is a stock vllm serve, whose weight transfer on GPUs needs NCCL",
            key=servers[0].base_url,
            remedy="Start rollmatch serve with the same configuration.",
        )
    return StockSender(servers, rendezvous)
