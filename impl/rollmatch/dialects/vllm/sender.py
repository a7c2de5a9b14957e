"""Weights to stock ``vllm serve``: pause, start, update, finish, resume, each answered before the next one is sent.

The learner is rank 0 of one group with all workers of all servers. A stock server loads weights in place of the old
ones, so it is paused from the first call to the last, and resumed whatever becomes of them.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from rollmatch.dialects.calls import BackgroundCall
from rollmatch.dialects.native.group import Rendezvous, wait_until_free
from rollmatch.dialects.queued_sender import AdapterUnproven
from rollmatch.dialects.session import RolloutServer
from rollmatch.errors import RollmatchError
from rollmatch.weights.gloo import BUCKET_BYTES, GlooGroup
from rollmatch.weights.group_address import GroupAddress, own_address
from rollmatch.weights.plan import Plan, WeightTransfer, make_plan, spec_of

RANK, SECRET_BYTES = 0, 32
PAUSE, RESUME, CLOSE = "/pause", "/resume", "/shutdown_weight_transfer_engine"
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
_UPDATE_TIMEOUT_S = 600.0
_POLL_S, _GRACE_S = 0.002, 5.0


class StockSender:
    """Rank 0's way to stock servers."""

    def __init__(self, servers: Sequence[RolloutServer], rendezvous: Rendezvous) -> None:
        self.servers, self.rendezvous = tuple(servers), rendezvous
        self._group: GlooGroup | None = None
        self._versions: tuple[str, ...] = ()

    @property
    def instances(self) -> None:
        """None: no sync of this dialect names them."""
        return None

    def send(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        """All weights, to all servers at the same time. Errors: ``TransferFailed``, and the servers' own."""
        named = list(weights)
        plan = make_plan([spec_of(*pair) for pair in named], bucket_bytes=BUCKET_BYTES)
        group = self._open()
        try:
            self._everywhere(lambda server: server.control(PAUSE, query="mode=wait&clear_cache=true"))
            self._everywhere(lambda server: server.control(START))
            self._update(group, plan, tuple(named[index][1] for index in plan.order))
            self._everywhere(lambda server: _finish(server, f"rollmatch-{version}"))
        except RollmatchError:
            group.close()
            self._group = None
            raise
        finally:
            self._everywhere(lambda server: server.control(RESUME))
        self._versions = self._read_versions()

    def send_adapter(self, adapter: Any, *, version: int) -> None:
        """Errors: ``AdapterUnproven``, always."""
        url, remedy = self.servers[0].base_url, "Set sync.mode to full, or serve with rollmatch serve."
        raise AdapterUnproven(f"{url} is a stock vllm serve, which proves no merge", key=url, remedy=remedy)

    def close(self) -> None:
        """Leave the group; the servers leave, too."""
        if self._group is not None:
            self._group.close()
            for call in [
                BackgroundCall(partial(server.control, CLOSE)) for server in self.servers if CLOSE in server.routes
            ]:
                call.is_done(within_s=_GRACE_S)
        self._group = None

    def _open(self) -> GlooGroup:
        """The open group, or a new one if a server was started again since."""
        if self._group is not None and self._read_versions() == self._versions:
            return self._group
        self.close()
        wait_until_free(self.rendezvous.host, self.rendezvous.port, within_s=self.rendezvous.timeout_s + _GRACE_S)
        sizes = [int(server.get("/get_world_size")["world_size"]) for server in self.servers]
        address = GroupAddress(
            host=own_address(self.rendezvous.host, self.rendezvous.port),
            port=self.rendezvous.port,
            rank=RANK,
            world_size=1 + sum(sizes),
            secret=secrets.token_hex(SECRET_BYTES),
            timeout_s=self.rendezvous.timeout_s,
            join_timeout_s=self.rendezvous.join_timeout_s,
        )
        joining = BackgroundCall(partial(GlooGroup.open, address, source=RANK))
        offsets = [1 + sum(sizes[:place]) for place in range(len(sizes))]
        calls = [
            BackgroundCall(partial(_ask_to_join, *pair, address)) for pair in zip(self.servers, offsets, strict=True)
        ]
        self._group = _first_of(joining, calls)
        return self._group

    def _update(self, group: GlooGroup, plan: Plan, tensors: tuple[Tensor, ...]) -> None:
        body = {"update_info": _described(plan)}
        calls = [BackgroundCall(partial(_tell, server, UPDATE, body)) for server in self.servers]
        sending = BackgroundCall(partial(group.send, WeightTransfer(plan=plan, tensors=tensors)))
        _first_of(sending, calls)

    def _everywhere(self, call: Callable[[RolloutServer], Any]) -> list[Any]:
        """One call to each server at the same time; all are waited for before an error is raised."""
        calls = [BackgroundCall(partial(call, server)) for server in self.servers]
        for pending in calls:
            pending.is_done(within_s=_UPDATE_TIMEOUT_S)
        return [pending.result() for pending in calls]

    def _read_versions(self) -> tuple[str, ...]:
        return tuple(server.instance() for server in self.servers)


def _first_of(ours: BackgroundCall[Any], theirs: Sequence[BackgroundCall[Any]]) -> Any:
    """Our part's result once all are done; a server's error at once, and before ours, of which it is the cause."""
    waiting = list(theirs)
    while waiting or not ours.is_done():
        for call in [call for call in waiting if call.is_done(within_s=_POLL_S)]:
            call.result()
            waiting.remove(call)
        if ours.is_done(within_s=_POLL_S):
            _raise_cause(ours, waiting)
    return ours.result()


def _raise_cause(ours: BackgroundCall[Any], theirs: Sequence[BackgroundCall[Any]]) -> None:
    """Errors: a server's, where ours failed and one comes within the grace; else ours."""
    try:
        ours.result()
    except RollmatchError:
        for call in theirs:
            if call.is_done(within_s=_GRACE_S):
                call.result()
        raise


def _described(plan: Plan) -> dict[str, Any]:
    return {
        "names": [spec.name for spec in plan.specs],
        "dtype_names": [spec.dtype for spec in plan.specs],
        "shapes": [list(spec.shape) for spec in plan.specs],
        "buckets": [bucket.stop - bucket.start for bucket in plan.buckets],
    }


def _ask_to_join(server: RolloutServer, offset: int, address: GroupAddress) -> Any:
    init_info = {
        "master_address": address.host,
        "master_port": address.port,
        "rank_offset": offset,
        "world_size": address.world_size,
        "secret": address.secret,
        "timeout_s": address.timeout_s,
        "join_timeout_s": address.join_timeout_s,
    }
    limit_s = address.join_timeout_s + _GRACE_S
    return server.control("/init_weight_transfer_engine", {"init_info": init_info}, timeout_s=limit_s)


def _finish(server: RolloutServer, version: str) -> None:
    """The new weights serve under a name of ours; what older ones computed is forgotten."""
    server.control(FINISH, {"weight_version": version})
    server.empty_caches()


def _tell(server: RolloutServer, route: str, body: Any) -> Any:
    return server.control(route, body, timeout_s=_UPDATE_TIMEOUT_S)
