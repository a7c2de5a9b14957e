"""Weights to stock ``vllm serve``: pause, start, update, finish, resume, each answered before the next one is sent.

The learner is rank 0 of one group with all workers of all servers. A stock server loads weights in place of the old
ones, so it is paused from the first call to the last, and resumed whatever becomes of them.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypedDict

import msgspec
from packaging.version import VERSION_PATTERN
from torch import Tensor

from rollmatch.dialects.calls import BackgroundCall, Result
from rollmatch.dialects.http import RunningCall
from rollmatch.dialects.native.group import GRACE_S, Rendezvous, wait_until_free
from rollmatch.dialects.sender import WeightSender
from rollmatch.dialects.session import RolloutServer
from rollmatch.dialects.vllm.transports import RANK, GlooTransport, NcclTransport, StockTransport
from rollmatch.errors import RollmatchError, SyncError
from rollmatch.weights.gloo import BUCKET_BYTES
from rollmatch.weights.group_address import GroupAddress, not_joined, own_address
from rollmatch.weights.named_weights import Adapter
from rollmatch.weights.nccl import device_of
from rollmatch.weights.plan import Plan, WeightTransfer, outgoing

SECRET_BYTES = 32
PAUSE, RESUME, CLOSE = "/pause", "/resume", "/shutdown_weight_transfer_engine"
JOIN, INFO = "/init_weight_transfer_engine", "/server_info"
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
_UPDATE_TIMEOUT_S, _INFO_TIMEOUT_S = 600.0, 60.0
_POLL_S, _GRACE_S = 0.002, 5.0


class _Version(TypedDict):
    version: Annotated[str, msgspec.Meta(pattern=f"(?ix)^{VERSION_PATTERN}$")]


class _Config(TypedDict, total=False):
    weight_transfer_config: dict[str, object] | None


class _Info(TypedDict):
    vllm_config: _Config


class StockSender(WeightSender):
    """Rank 0's way to stock servers."""

    def __init__(self, servers: Sequence[RolloutServer], rendezvous: Rendezvous) -> None:
        """Errors: ``weights-not-taken``, where a server says that it has another engine."""
        self.servers, self.rendezvous = tuple(servers), rendezvous
        device = device_of(())
        self._transport: StockTransport[Any] = (
            NcclTransport(device, servers[0].get("/version", _Version)["version"])
            if device.type == "cuda"
            else GlooTransport()
        )
        for server in servers:
            _check_engine(server, self._transport.backend)
        self._is_open = False
        self._versions: tuple[str, ...] = ()

    def send(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """All weights, to all servers at the same time. Errors: ``TransferFailed``, and the servers' own."""
        transfer = outgoing(weights, bucket_bytes=BUCKET_BYTES)
        self._open()
        try:
            self._everywhere(lambda server: server.control(PAUSE, query="mode=wait&clear_cache=true"))
            self._everywhere(lambda server: server.control(START))
            self._update(transfer)
            self._everywhere(lambda server: _finish(server, f"rollmatch-{version}"))
        except RollmatchError:
            self._transport.close()
            self._is_open = False
            raise
        finally:
            self._everywhere(lambda server: server.control(RESUME))
        self._versions = self._read_versions()

    def send_adapter(self, adapter: Adapter, *, version: int) -> None:
        """Errors: ``adapter-unproven``, always."""
        url, remedy = self.servers[0].base_url, "Set sync.mode to full, or serve with rollmatch serve."
        raise SyncError(
            f"{url} is a stock vllm serve, which proves no merge", code="adapter-unproven", key=url, remedy=remedy
        )

    def close(self) -> None:
        """Leave the group; the servers leave, too."""
        if self._is_open:
            self._transport.close()
            for call in [
                BackgroundCall(partial(server.control, CLOSE)) for server in self.servers if CLOSE in server.routes
            ]:
                call.is_done(within_s=_GRACE_S)
        self._is_open = False

    def _open(self) -> None:
        """Open a group, unless one is open and no server was started again since."""
        if self._is_open and self._read_versions() == self._versions:
            return
        self.close()
        wait_until_free(self.rendezvous.host, self.rendezvous.port, within_s=GRACE_S)
        sizes = [server.world_size() for server in self.servers]
        here = replace(self.rendezvous, host=own_address(self.rendezvous.host, self.rendezvous.port))
        address = here.address(rank=RANK, world_size=1 + sum(sizes), secret=secrets.token_hex(SECRET_BYTES))
        joining = BackgroundCall(partial(self._transport.open, address))
        limit_s = self.rendezvous.join_call_timeout_s
        bodies = [
            {"init_info": self._transport.init_info(address, 1 + sum(sizes[:place]))} for place in range(len(sizes))
        ]
        calls = [
            BackgroundCall(partial(server.control, JOIN, body, timeout_s=limit_s))
            for server, body in zip(self.servers, bodies)
        ]
        deadline = time.monotonic() + limit_s
        _first_of(joining, calls, partial(_check_joined, address, deadline))
        self._is_open = True

    def _update(self, transfer: WeightTransfer) -> None:
        plan = transfer.plan
        body = {"update_info": _described(plan) | self._transport.update_info(plan)}
        calls = [
            BackgroundCall(partial(server.control, UPDATE, body, timeout_s=_UPDATE_TIMEOUT_S))
            for server in self.servers
        ]
        sending = BackgroundCall(partial(self._transport.send, transfer))
        _first_of(sending, calls)

    def _everywhere(self, call: Callable[[RolloutServer], Result]) -> list[Result]:
        """One call to each server at the same time; all are waited for before an error is raised."""
        calls = [BackgroundCall(partial(call, server)) for server in self.servers]
        for pending in calls:
            pending.is_done(within_s=_UPDATE_TIMEOUT_S)
        return [pending.result() for pending in calls]

    def _read_versions(self) -> tuple[str, ...]:
        return tuple(server.instance() for server in self.servers)


def _first_of(
    ours: RunningCall[object], theirs: Sequence[RunningCall[object]], check: Callable[[], None] = lambda: None
) -> None:
    """Wait until all are done; a server's error comes at once, and before ours, of which it is the cause.

    ``check`` raises when the wait has to end.
    """
    waiting = list(theirs)
    while waiting or not ours.is_done():
        check()
        for call in [call for call in waiting if call.is_done(within_s=_POLL_S)]:
            call.result()
            waiting.remove(call)
        if ours.is_done(within_s=_POLL_S):
            _raise_cause(ours, waiting)
    ours.result()


def _check_joined(address: GroupAddress, deadline: float) -> None:
    """NCCL itself waits for ever. Errors: ``CommunicatorTimeout``."""
    if time.monotonic() > deadline:
        raise not_joined(address, "a server has not joined")


def _raise_cause(ours: RunningCall[object], theirs: Sequence[RunningCall[object]]) -> None:
    """Errors: a server's, where ours failed and one comes within the grace; else ours."""
    try:
        ours.result()
    except RollmatchError:
        for call in theirs:
            if call.is_done(within_s=_GRACE_S):
                call.result()
        raise


def _described(plan: Plan) -> dict[str, object]:
    return {
        "names": [spec.name for spec in plan.specs],
        "dtype_names": [spec.dtype for spec in plan.specs],
        "shapes": [list(spec.shape) for spec in plan.specs],
    }


def _check_engine(server: RolloutServer, backend: str) -> None:
    """Errors: ``weights-not-taken``, where the server says what it was started with."""
    if INFO not in server.routes:
        return
    about = server.get(INFO, _Info, query="config_format=json", timeout_s=_INFO_TIMEOUT_S)
    found = (about["vllm_config"].get("weight_transfer_config") or {}).get("backend")
    if found != backend:
        problem = f"{server.base_url} was started with weight transfer backend {found}, this machine needs {backend}"
        remedy = f"""Start it with --weight-transfer-config '{{"backend": "{backend}"}}'."""
        raise SyncError(problem, code="weights-not-taken", key=server.base_url, remedy=remedy)


def _finish(server: RolloutServer, version: str) -> None:
    """The new weights serve under a name of ours; what older ones computed is forgotten."""
    server.control(FINISH, {"weight_version": version})
    server.empty_caches()
