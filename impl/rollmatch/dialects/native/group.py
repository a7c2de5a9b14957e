"""The group of rank 0 and all workers of all servers."""

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rollmatch.dialects.calls import BackgroundCall, RunningCall
from rollmatch.dialects.http import MSGPACK, ServerRefused
from rollmatch.dialects.session import RolloutServer
from rollmatch.errors import RollmatchError, SyncError
from rollmatch.weights.digest_kinds import DIRECT, GLOO
from rollmatch.weights.direct_group import DirectGroup
from rollmatch.weights.gloo_group import (
    DROP,
    GO,
    CommunicatorTimeout,
    GlooGroup,
    GroupAddress,
    GroupPortInUse,
    TransferFailed,
)

COMMUNICATOR, CLOSE = "/native/communicator", "/native/communicator/close"
_POLL_S, _READY_POLL_S = 0.0003, 0.0001
_DOUBT_S = 0.05
"""After so long without an answer servers are asked whether they live."""
_GRACE_S = 5.0
_FREE_POLL_S = 0.1
_REFUSAL_S = 0.3
_CPU = torch.device("cpu")


class NotReady(SyncError):
    """Every server is ready for the bytes of a sync in time."""

    code = "sync-not-ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the group meets and how long its members wait."""

    host: str
    port: int
    client: str
    """Names this learner; a later process with the same name takes its place."""
    timeout_s: float
    """Longest broadcast."""
    join_timeout_s: float


class Communicator:
    """An open group; the learner is its last rank and the source of every broadcast."""

    def __init__(
        self,
        servers: Sequence[RolloutServer],
        sizes: Sequence[int],
        meeting: Meeting,
        *,
        transport: str = GLOO,
        device: torch.device = _CPU,
    ) -> None:
        """``sizes``: workers of each server; ``device``: the learner's weights'.

        Errors: those of the servers, ``CommunicatorTimeout``, ``NcclNotOpened``.
        """
        self.servers, self.meeting, self.transport, self.device = tuple(servers), meeting, transport, device
        self.rank = sum(sizes)
        self.group: Any = self._join(sizes)

    def begin(self, sync_id: str, calls: Sequence[RunningCall[Any]]) -> None:
        """Give the word for the bytes once every worker is ready; a server that refuses costs the others nothing.

        Errors: that of the first call that ended with one, ``NotReady``.
        """
        try:
            self._wait_ready(sync_id, calls)
        except RollmatchError:
            with suppress(TransferFailed):  # with the first server its store is gone, too
                self.group.tell(sync_id, DROP)
            raise
        self.group.tell(sync_id, GO)

    def close(self) -> None:
        """Leave, and tell the servers."""
        self.group.close()
        close_everywhere(self.servers, self.meeting)

    def _join(self, sizes: Sequence[int]) -> Any:
        """Servers join while we do; the first one's first worker holds the store.

        What an earlier process of the same name left open is closed first, or members could meet in its store.
        """
        meeting, world_size = self.meeting, self.rank + 1
        close_everywhere(self.servers, meeting)
        wait_until_free(meeting.host, meeting.port)
        offsets = [sum(sizes[:place]) for place in range(len(sizes))]
        calls = [
            BackgroundCall(partial(_ask_to_join, server, meeting, (world_size, offset), self.transport))
            for server, offset in zip(self.servers, offsets, strict=True)
        ]
        try:
            return self._join_store(calls, world_size)
        except RollmatchError:
            close_everywhere(self.servers, meeting)
            raise

    def _join_store(self, calls: Sequence[BackgroundCall[Any]], world_size: int) -> Any:
        """Begins once somebody listens: an attempt that is left behind in native code could break the process's end."""
        meeting, deadline = self.meeting, time.monotonic() + self.meeting.join_timeout_s
        calls[0].is_done(within_s=_REFUSAL_S)  # a server that cannot listen says so at once, whoever else does
        while not _is_taken(meeting.host, meeting.port):
            tell_refusals(calls)
            if time.monotonic() > deadline:
                raise self._nobody(calls)
            time.sleep(_POLL_S)
        tell_refusals(calls)
        address = GroupAddress(
            host=meeting.host,
            port=meeting.port,
            rank=self.rank,
            world_size=world_size,
            timeout_s=meeting.timeout_s,
            join_timeout_s=meeting.join_timeout_s,
        )
        joining: BackgroundCall[Any] = BackgroundCall(partial(_open_group, address, self.transport, self.device))
        while not joining.is_done(within_s=_POLL_S):
            tell_refusals(calls)
        try:
            group = joining.result()
        except CommunicatorTimeout as error:
            if time.monotonic() < deadline:
                raise
            raise self._nobody(calls) from error
        for call in calls:
            call.result()
        return group

    def _nobody(self, calls: Sequence[BackgroundCall[Any]]) -> CommunicatorTimeout:
        """What to say when some servers did not join."""
        silent = [server.base_url for server, call in zip(self.servers, calls, strict=True) if not call.is_done()]
        return CommunicatorTimeout(
            f"{', '.join(silent)} did not join the communicator within {self.meeting.join_timeout_s:g} s",
            key=silent[0] if silent else f"group_port {self.meeting.port}",
            remedy="Look at the server's output; check that its host reaches itself at the group's address.",
        )

    def _wait_ready(self, sync_id: str, calls: Sequence[RunningCall[Any]]) -> None:
        began, doubts = time.monotonic(), list[BackgroundCall[Any]]()
        deadline = began + self.meeting.timeout_s
        while not self.group.is_ready(sync_id, range(self.rank)):
            tell_refusals([*calls, *doubts])
            if not doubts and time.monotonic() > began + _DOUBT_S:
                doubts = [BackgroundCall(server.instance) for server in self.servers]
            if time.monotonic() > deadline:
                problem = f"some worker was not ready for the weights within {self.meeting.timeout_s:g} s"
                raise NotReady(problem, key=sync_id, remedy="Look at the servers' output.")
            time.sleep(_READY_POLL_S)


def _open_group(address: GroupAddress, transport: str, device: torch.device) -> GlooGroup | DirectGroup:
    """In a thread of its own, where the caller's GPU is not the current one."""
    if transport != DIRECT:
        return GlooGroup.open(address)
    from rollmatch.weights.worker.direct import open_direct

    return open_direct(address, device)


def close_everywhere(servers: Sequence[RolloutServer], meeting: Meeting) -> None:
    """Tell all servers that this learner leaves; those that are gone cannot hear it, and need not."""
    calls = [BackgroundCall(partial(_ask_to_leave, server, meeting)) for server in servers]
    deadline = time.monotonic() + _GRACE_S
    for call in calls:
        call.is_done(within_s=max(0.001, deadline - time.monotonic()))


def tell_refusals(calls: Sequence[RunningCall[Any]]) -> None:
    """Errors: that of a call that has ended with one."""
    for call in calls:
        if call.is_done():
            call.result()


def wait_until_free(host: str, port: int, *, within_s: float = _GRACE_S) -> None:
    """A store that was just closed may listen a moment longer; whatever still does then is its binder's to tell."""
    deadline = time.monotonic() + within_s
    while _is_taken(host, port) and time.monotonic() < deadline:
        time.sleep(_FREE_POLL_S)


def _is_taken(host: str, port: int) -> bool:
    """Whether somebody listens."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _ask_to_join(server: RolloutServer, meeting: Meeting, place: tuple[int, int], transport: str) -> Any:
    """``place``: world size, and rank of the server's first worker."""
    body = {
        "client": meeting.client,
        "host": meeting.host,
        "port": meeting.port,
        "world_size": place[0],
        "rank_offset": place[1],
        "transport": transport,
        "timeout_s": meeting.timeout_s,
        "join_timeout_s": meeting.join_timeout_s,
        "replace": True,
    }
    limit = meeting.join_timeout_s + _GRACE_S
    try:
        return server.control(COMMUNICATOR, body, timeout_s=limit, content_type=MSGPACK)
    except ServerRefused as refusal:
        if refusal.code == GroupPortInUse.code:  # a URL in the problem would name the server's HTTP port, which is fine
            problem = f"the first server's machine has no free port {meeting.port} at {meeting.host}"
            raise GroupPortInUse(problem, key=refusal.key, remedy=refusal.remedy) from refusal
        raise


def _ask_to_leave(server: RolloutServer, meeting: Meeting) -> Any:
    body = {"client": meeting.client, "force": False}
    return server.control(CLOSE, body, timeout_s=_GRACE_S, content_type=MSGPACK)


def resolve(host: str) -> str:
    """An address for a name, because a group meets at addresses; IPv4 where there is one.

    >>> resolve("127.0.0.1"), resolve("::1")
    ('127.0.0.1', '::1')
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])
