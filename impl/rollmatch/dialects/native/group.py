"""Opening the group of rank 0 and all workers of all servers, and agreeing on protocol and transport."""

import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
import torch
from torch import Tensor

from rollmatch.dialects.calls import BackgroundCall
from rollmatch.dialects.http import MSGPACK, ServerRefused, raise_failures
from rollmatch.dialects.reply import read_as
from rollmatch.dialects.session import HEALTH_TIMEOUT_S, RolloutServer
from rollmatch.errors import RollmatchError, SyncError
from rollmatch.server.payloads import PROTOCOL
from rollmatch.weights.digest import DIGEST_KINDS, DIRECT, GLOO
from rollmatch.weights.group_address import MAX_WORLD_SIZE, CommunicatorTimeout, GroupAddress, GroupPortInUse
from rollmatch.weights.plan import Spec
from rollmatch.weights.transports import TRANSPORTS, Transport, WeightSource

AUTO = "auto"
IDENTITY, COMMUNICATOR, CLOSE = "/native/identity", "/native/communicator", "/native/communicator/close"
_POLL_S = 0.0003
_REFUSAL_S = 0.3
_FREE_POLL_S = 0.1
GRACE_S = 5.0
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Address of the group, and how long its members wait."""

    host: str
    port: int
    client: str
    """Names this learner; a later process with the same name takes its place."""
    timeout_s: float
    """Longest broadcast."""
    join_timeout_s: float

    @property
    def port_held_s(self) -> float:
        """How long the port of a group that was left may stay taken: a worker may still wait for the last broadcast."""
        return self.timeout_s + GRACE_S

    @property
    def join_call_timeout_s(self) -> float:
        """Of a server's call to join: longer, so that what the server says of it arrives."""
        return self.join_timeout_s + GRACE_S

    def address(self, *, rank: int, world_size: int, secret: str = "") -> GroupAddress:
        """The address of the group, for one of its ranks."""
        limits: dict[str, Any] = {"timeout_s": self.timeout_s, "join_timeout_s": self.join_timeout_s}
        return GroupAddress(host=self.host, port=self.port, rank=rank, world_size=world_size, secret=secret, **limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerIdentity:
    """What a server says of itself before weights are sent."""

    instance: str
    """New at every start."""
    world_size: int
    tensors: Mapping[str, Spec]
    aliases: Mapping[str, str]
    transports: tuple[str, ...]
    """The best first."""
    keep: bool
    """Whether a sync may keep responses under way."""


class _Tensor(TypedDict):
    name: str
    dtype: str
    shape: tuple[int, ...]


class _Identity(TypedDict):
    """``ServerIdentity`` as it travels."""

    digest: str
    instance: str
    world_size: Annotated[int, msgspec.Meta(ge=1, lt=MAX_WORLD_SIZE)]
    tensors: list[_Tensor]
    aliases: dict[str, str]
    transports: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    keep: NotRequired[bool]


def read_identity(server: RolloutServer) -> ServerIdentity:
    """Errors: ``protocol-unknown``, those of the call."""
    about = server.get(IDENTITY, dict[str, object], timeout_s=HEALTH_TIMEOUT_S)
    is_known = about.get("protocol") == PROTOCOL
    if is_known:
        fields = read_as(_Identity, about, route=IDENTITY, base_url=server.base_url)
        is_known = fields["digest"] == DIGEST_KINDS.get(fields["transports"][0])
    if not is_known:
        problem = f"{server.base_url} speaks protocol {about.get('protocol')} with {about.get('digest')}"
        problem += f", this learner protocol {PROTOCOL}"
        raise SyncError(
            problem, code="protocol-unknown", key=server.base_url, remedy="Install the same rollmatch on both sides."
        )
    return ServerIdentity(
        instance=fields["instance"],
        world_size=fields["world_size"],
        tensors={each["name"]: Spec(**each) for each in fields["tensors"]},
        aliases=fields["aliases"],
        transports=fields["transports"],
        keep=fields.get("keep", False),
    )


def choose_transport(servers: Sequence[RolloutServer], identities: Sequence[ServerIdentity], wanted: str) -> Transport:
    """``wanted``, or for ``auto`` what all servers prefer; straight into GPUs only from a GPU.

    Errors: ``protocol-unknown``.
    """
    preferred = {identity.transports[0] for identity in identities}
    best = DIRECT if preferred == {DIRECT} and torch.cuda.is_available() else GLOO
    name = best if wanted == AUTO else wanted
    for server, identity in zip(servers, identities, strict=True):
        if name not in identity.transports:
            problem = f"{server.base_url} has transports {' and '.join(identity.transports)}; {name} is wanted"
            raise SyncError(
                problem,
                code="protocol-unknown",
                key=server.base_url,
                remedy="Install the same rollmatch on both sides.",
            )
    return TRANSPORTS[name]


class LearnerGroup:
    """An open group; the learner is its last rank and the source of every broadcast."""

    def __init__(
        self,
        servers: Sequence[RolloutServer],
        identities: Sequence[ServerIdentity],
        rendezvous: Rendezvous,
        transport: Transport,
        weights: Iterable[tuple[str, Tensor]],
    ) -> None:
        """Join, on the device of the weights.

        Errors: those of the servers, ``CommunicatorTimeout``, ``NcclNotOpened``.
        """
        self.servers, self.identities, self.rendezvous = tuple(servers), tuple(identities), rendezvous
        self.transport, self._device = transport, transport.device_of(weights)
        self.rank = sum(identity.world_size for identity in identities)
        self._secret = secrets.token_hex(_SECRET_BYTES)
        self.source: WeightSource = self._join()

    def close(self) -> None:
        """Leave; the servers leave, too."""
        self.source.close()
        close_everywhere(self.servers, self.rendezvous)

    def _join(self) -> WeightSource:
        """Servers join while we do; the first one's first worker holds the store.

        What an earlier process of the same name left open is closed first, because it holds the port.
        """
        rendezvous = self.rendezvous
        is_held = close_everywhere(self.servers, rendezvous)
        within_s = rendezvous.port_held_s if is_held else GRACE_S
        wait_until_free(rendezvous.host, rendezvous.port, within_s=within_s)
        sizes = [identity.world_size for identity in self.identities]
        pairs = zip(self.servers, accumulate(sizes, initial=0))
        calls = [BackgroundCall(partial(self._ask_to_join, server, offset)) for server, offset in pairs]
        try:
            return self._join_store(calls)
        except RollmatchError:
            close_everywhere(self.servers, rendezvous)
            raise

    def _join_store(self, calls: Sequence[BackgroundCall[object]]) -> WeightSource:
        """Begins once somebody listens: an attempt that is left behind in native code could break the process's end."""
        rendezvous, deadline = self.rendezvous, time.monotonic() + self.rendezvous.join_timeout_s
        calls[0].is_done(within_s=_REFUSAL_S)  # a server that cannot listen says so at once, whoever else does
        while not _is_taken(rendezvous.host, rendezvous.port):
            raise_failures(calls)
            if time.monotonic() > deadline:
                raise self._nobody(calls)
            time.sleep(_POLL_S)
        raise_failures(calls)
        joining = BackgroundCall(partial(self.transport.open, self._address(), self._device))
        while not joining.is_done(within_s=_POLL_S):
            raise_failures(calls)
        try:
            source = joining.result()
        except CommunicatorTimeout as error:
            if time.monotonic() < deadline:
                raise
            raise self._nobody(calls) from error
        for call in calls:
            call.result()
        return source

    def _address(self) -> GroupAddress:
        return self.rendezvous.address(rank=self.rank, world_size=self.rank + 1, secret=self._secret)

    def _ask_to_join(self, server: RolloutServer, offset: int) -> object:
        """``offset``: rank of the server's first worker."""
        address = self._address()
        body = {
            "client": self.rendezvous.client,
            "host": address.host,
            "port": address.port,
            "world_size": address.world_size,
            "secret": address.secret,
            "rank_offset": offset,
            "transport": self.transport.name,
            "timeout_s": address.timeout_s,
            "join_timeout_s": address.join_timeout_s,
            "replace": True,
        }
        limit_s = self.rendezvous.join_call_timeout_s
        try:
            return server.control(COMMUNICATOR, body, timeout_s=limit_s, content_type=MSGPACK)
        except ServerRefused as refusal:
            if refusal.code == GroupPortInUse.code:  # a URL in the problem would name the server's HTTP port
                problem = f"the first server's machine has no free port {address.port} at {address.host}"
                raise GroupPortInUse(problem, key=refusal.key, remedy=refusal.remedy) from refusal
            raise

    def _nobody(self, calls: Sequence[BackgroundCall[object]]) -> CommunicatorTimeout:
        """The error for servers that did not join."""
        silent = [server.base_url for server, call in zip(self.servers, calls, strict=True) if not call.is_done()]
        return CommunicatorTimeout(
            f"{', '.join(silent)} did not join the communicator within {self.rendezvous.join_timeout_s:g} s",
            key=silent[0] if silent else f"group_port {self.rendezvous.port}",
            remedy="Look at the server's output; check that its host reaches itself at the group's address.",
        )


def close_everywhere(servers: Sequence[RolloutServer], rendezvous: Rendezvous) -> bool:
    """Close this learner's group on all servers, as far as they answer in time; whether a worker is still in one."""
    calls = [BackgroundCall(partial(_ask_to_leave, server, rendezvous)) for server in servers]
    are_left = [call.is_done(within_s=GRACE_S) and call.result() for call in calls]  # all run at once
    return any(are_left)


def wait_until_free(host: str, port: int, *, within_s: float) -> None:
    """A store that was just closed may listen a moment longer; whoever binds reports what still does then."""
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


def _ask_to_leave(server: RolloutServer, rendezvous: Rendezvous) -> bool:
    body = {"client": rendezvous.client, "force": False}
    try:
        reply = server.control(CLOSE, body, timeout_s=GRACE_S, content_type=MSGPACK)
    except RollmatchError:  # whatever it is, a call to join fails by it, too
        return False
    return isinstance(reply, dict) and bool(reply.get("leaving"))


def resolve(host: str) -> str:
    """An address for a name, because a group opens at addresses; IPv4 where there is one.

    >>> resolve("127.0.0.1"), resolve("::1")
    ('127.0.0.1', '::1')
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])
