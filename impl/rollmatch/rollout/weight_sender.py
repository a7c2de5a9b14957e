"""The sender of weights that a set of servers understands."""

from collections.abc import Sequence

from rollmatch.dialects.native.group import Rendezvous
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.dialects.sender import WeightSender
from rollmatch.dialects.session import RolloutServer
from rollmatch.dialects.trl.sender import TrlSender
from rollmatch.dialects.vllm.sender import StockSender
from rollmatch.errors import SyncError


def make_sender(
    servers: Sequence[RolloutServer], rendezvous: Sequence[Rendezvous], *, stage: bool, keep: bool = False
) -> WeightSender:
    """Rank 0's way to connected servers; ``rendezvous``: one per server, of which a common group takes the first.

    ``stage``: full syncs change nothing before all servers have them. ``keep``: newer weights write the rest of
    responses under way; native dialect only.
    Errors: ``dialects-mixed``, ``staging-unavailable``, ``weights-not-taken``.
    """
    dialects = {server.dialect.name for server in servers}
    if len(dialects) > 1:
        named = ", ".join(f"{server.base_url} speaks {server.dialect.name}" for server in servers)
        raise SyncError(
            named, code="dialects-mixed", key=servers[0].base_url, remedy="Start the same kind of server everywhere."
        )
    if dialects == {"native"}:
        return NativeSender(servers, rendezvous[0], stage=stage, keep=keep)
    if stage:
        problem = f"{servers[0].base_url} speaks {servers[0].dialect.name} and loads weights as they come"
        remedy = "Set sync.stage to false, or start it with rollmatch serve."
        raise SyncError(problem, code="staging-unavailable", key=servers[0].base_url, remedy=remedy)
    if dialects <= {"swift", "trl"}:
        return TrlSender(servers, rendezvous)
    return StockSender(servers, rendezvous[0])
