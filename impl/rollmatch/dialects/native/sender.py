"""Weights to servers of the native dialect: one control call each, one broadcast for all.

Over gloo several servers stage first and commit when all have proven what they hold, so that one that fails leaves
the others on the old version; weights in place are committed by each as soon as it has proven them. A sync that failed
half-way leaves no group behind; the next one meets anew.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from rollmatch.dialects.calls import BackgroundCall, RunningCall
from rollmatch.dialects.http import MSGPACK, HttpReply
from rollmatch.dialects.native.group import Communicator, Meeting, tell_refusals
from rollmatch.dialects.session import HEALTH_TIMEOUT_S, RolloutServer
from rollmatch.errors import RollmatchError, SyncError
from rollmatch.weights.adapter import Adapter
from rollmatch.weights.carriers import CARRIERS, Carrier
from rollmatch.weights.comparison import DigestMismatch, check_digests
from rollmatch.weights.digest_kinds import DIGEST_KINDS, DIRECT, GLOO
from rollmatch.weights.gloo_group import TransferFailed
from rollmatch.weights.plan import Plan, Spec, fit, make_plan, spec_of

AUTO = "auto"
IDENTITY, SYNC, AGAIN = "/native/identity", "/native/sync", "/native/sync/again"
COMMIT, DROP = "/native/sync/commit", "/native/sync/drop"
_REPLY_TIMEOUT_S = 600.0
_GRACE_S = 5.0
_LEFT = "communicator-missing"
"""What a server tells of a sync that the learner itself has left."""


class ProtocolUnknown(SyncError):
    """Learner and server speak the same version of the native protocol."""

    code = "protocol-unknown"


class SyncUnconfirmed(SyncError):
    """A server says that it serves the new version."""

    code = "sync-unconfirmed"


class NativeSender:
    """Rank 0's way to its servers; opens the group when it first sends."""

    def __init__(
        self, servers: Sequence[RolloutServer], meeting: Meeting, *, bucket_bytes: int = 0, transport: str = AUTO
    ) -> None:
        """``transport``: ``gloo``, ``direct``, or by itself the second where both sides have GPUs."""
        self.servers, self.meeting, self.bucket_bytes = tuple(servers), meeting, bucket_bytes
        self.wanted = transport
        self._carrier: Carrier = CARRIERS[GLOO]()
        self._communicator: Communicator | None = None
        self._identities: tuple[dict[str, Any], ...] = ()
        self._plans: dict[Any, Plan] = {}
        self._known: tuple[Plan, str] | None = None
        """The plan that all servers of the open group know, and their name for it."""
        self._num_syncs = 0

    @property
    def transport(self) -> str:
        """That of the last meeting."""
        return self._carrier.name

    @property
    def instances(self) -> tuple[str, ...] | None:
        """As the last sync met the servers."""
        return tuple(str(identity["instance"]) for identity in self._identities) or None

    def send(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        """All weights, as one version. Errors: those of ``plan``, ``gloo`` and ``digest``, and the servers' own."""
        named = list(weights)

        def pack() -> Any:
            plan = self._plan(named, whole=True)
            return self._carrier.pack(plan, [tensor for _, tensor in named], None)

        self._send(named, pack, version)

    def send_adapter(self, adapter: Adapter, *, version: int) -> None:
        """An adapter, merged by the servers and proven by the digests of the learner's own merge. Errors as above."""

        def pack() -> Any:
            plan = self._plan(adapter.tensors, whole=False)
            merged = dict(zip(adapter.merged_names, self._carrier.prove(adapter.merged), strict=True))
            about = {"merges": [dict(merge) for merge in adapter.merges], "merged_digests": merged}
            return self._carrier.pack(plan, [tensor for _, tensor in adapter.tensors], about)

        self._send(adapter.tensors, pack, version)

    def close(self) -> None:
        """Leave the group."""
        if self._communicator is not None:
            self._communicator.close()
        self._communicator = None

    def _send(self, weights: Iterable[tuple[str, Any]], pack: Callable[[], Any], version: int) -> None:
        """By the open group; once more by a new one where it was of no use, because a server was started again."""
        known = self.instances if self._communicator is not None else None
        try:
            self._ship(self._meet(weights), pack(), version)
        except RollmatchError:
            if known is None or not self._is_changed(known):
                raise
            self._ship(self._meet(weights), pack(), version)

    def _meet(self, weights: Iterable[tuple[str, Any]]) -> Communicator:
        """The open group, or a new one on the device of the weights."""
        if self._communicator is not None:
            return self._communicator
        identities = tuple(server.get(IDENTITY, timeout_s=HEALTH_TIMEOUT_S) for server in self.servers)
        name = _best_of(identities) if self.wanted == AUTO else self.wanted
        for server, identity in zip(self.servers, identities, strict=True):
            _check_protocol(server, identity, name)
        if name != self._carrier.name:
            self._carrier = CARRIERS[name]()
        self._identities, self._plans, self._known = identities, {}, None
        sizes = [identity["world_size"] for identity in identities]
        device = self._carrier.device(weights)
        self._communicator = Communicator(self.servers, sizes, self.meeting, transport=name, device=device)
        return self._communicator

    def _is_changed(self, known: tuple[str, ...]) -> bool:
        """Whether one of the servers is another process than it was; not where one does not answer."""
        try:
            return tuple(server.instance() for server in self.servers) != known
        except RollmatchError:
            return False

    def _plan(self, weights: Sequence[tuple[str, Any]], *, whole: bool) -> Plan:
        """Made once for the same tensors; ``whole`` compares them with what each server holds."""
        kind = tuple((name, tensor.dtype, tensor.shape) for name, tensor in weights)
        found = self._plans.get(kind)
        if found is None:
            fitted = [spec_of(*pair) for pair in weights]
            for server, identity in zip(self.servers if whole else (), self._identities, strict=False):
                held = {t["name"]: Spec(t["name"], t["dtype"], tuple(t["shape"])) for t in identity["tensors"]}
                fitted = fit(fitted, held, identity["aliases"], server=server.base_url)
            size = self.bucket_bytes or self._carrier.bucket_bytes
            found = self._plans[kind] = make_plan(fitted, bucket_bytes=size, tail_bytes=self._carrier.tail_bytes)
        return found

    def _ship(self, communicator: Communicator, shipment: Any, version: int) -> None:
        self._num_syncs += 1
        sync_id = f"{version}-{self._num_syncs}"
        route, body = self._announcement(shipment, sync_id, version)
        calls = [_begin(server, route, body) for server in self.servers]
        try:
            communicator.begin(sync_id, calls)
            self._carrier.carry(shipment, communicator.group, partial(tell_refusals, calls))
            replies = [call.result().body for call in calls]
            self._check(shipment, replies)
            if not body["commit"]:
                replies = self._commit(sync_id)
        except RollmatchError as error:
            self._give_up(sync_id)
            raise _better(error, calls) from error
        if route == SYNC and shipment.adapter is None:
            self._known = shipment.plan, sync_id
        for server, identity, reply in zip(self.servers, self._identities, replies, strict=True):
            _check_committed(server, reply, version)
            _check_instance(server, reply, identity["instance"])

    def _announcement(self, shipment: Any, sync_id: str, version: int) -> tuple[str, dict[str, Any]]:
        """Where to, and what: all tensors, or the name under which all servers know them."""
        told = {
            "client": self.meeting.client,
            "sync_id": sync_id,
            "version": version,
            "commit": len(self.servers) == 1 or not self._carrier.stages,
        }
        plan, like = self._known or (None, "")
        if shipment.adapter is None and plan is shipment.plan and all(AGAIN in one.routes for one in self.servers):
            return AGAIN, told | {"like": like}
        return SYNC, told | {
            "tensors": [{"name": s.name, "dtype": s.dtype, "shape": list(s.shape)} for s in shipment.plan.specs],
            "buckets": [bucket.stop - bucket.start for bucket in shipment.plan.buckets],
            "digests": None,  # they follow the tensors
            "adapter": shipment.adapter,
        }

    def _check(self, shipment: Any, replies: Sequence[Any]) -> None:
        names = [spec.name for spec in shipment.plan.specs]
        for server, reply in zip(self.servers, replies, strict=True):
            check_digests(names, shipment.digests, reply["digests"], server=server.base_url)
            if shipment.adapter is not None:
                _check_merged(shipment.adapter["merged_digests"], reply, server)

    def _commit(self, sync_id: str) -> list[Any]:
        body = {"client": self.meeting.client, "sync_id": sync_id}
        calls = [_begin(server, COMMIT, body) for server in self.servers]
        return [call.result().body for call in calls]

    def _give_up(self, sync_id: str) -> None:
        """Drop what is staged and leave; the servers go on with their old weights."""
        body = {"client": self.meeting.client, "sync_id": sync_id}
        calls = [BackgroundCall(partial(_tell_to_drop, server, body)) for server in self.servers]
        for call in calls:
            call.is_done(within_s=_GRACE_S)
        self.close()


def _begin(server: RolloutServer, route: str, body: dict[str, Any]) -> RunningCall[HttpReply]:
    return server.begin(route, body, timeout_s=_REPLY_TIMEOUT_S, content_type=MSGPACK)


def _tell_to_drop(server: RolloutServer, body: dict[str, Any]) -> Any:
    return server.control(DROP, body, timeout_s=_GRACE_S, content_type=MSGPACK)


def _best_of(identities: Sequence[dict[str, Any]]) -> str:
    """What all servers put first; straight into GPUs only from a GPU."""
    first = {identity["transports"][0] for identity in identities}
    return DIRECT if first == {DIRECT} and torch.cuda.is_available() else GLOO


def _check_protocol(server: RolloutServer, identity: dict[str, Any], transport: str) -> None:
    """The digest that a server names is that of the first of its transports."""
    transports = identity["transports"]
    known = identity.get("protocol") == 1 and transport in transports
    if not known or identity.get("digest") != DIGEST_KINDS.get(transports[0]):
        problem = f"{server.base_url} speaks protocol {identity.get('protocol')} with {identity.get('digest')}"
        problem += f" over {' and '.join(transports)}; {transport} is wanted"
        raise ProtocolUnknown(problem, key=server.base_url, remedy="Install the same rollmatch on both sides.")


def _check_merged(merged: dict[str, str], reply: dict[str, Any], server: RolloutServer) -> None:
    """What is served is bit for bit the learner's own merge."""
    held = reply.get("merged_digests") or {}
    for name, digest in merged.items():
        if held.get(name) != digest:
            problem = f"{name}, merged, has digest {digest} here and {held.get(name)} on {server.base_url}"
            raise DigestMismatch(problem, key=name, remedy="Set sync.mode to full.")


def _check_committed(server: RolloutServer, reply: dict[str, Any], version: int) -> None:
    if reply.get("committed") is not True or reply.get("policy_version") != version:
        problem = f"{server.base_url} serves version {reply.get('policy_version')}, {version} was sent"
        raise SyncUnconfirmed(problem, key=server.base_url, remedy="Look at the server's output and sync again.")


def _check_instance(server: RolloutServer, reply: dict[str, Any], instance: str) -> None:
    """It is the one that was met: no other health call is needed after a sync."""
    if reply.get("instance", instance) != instance:
        problem = f"{server.base_url} was {instance} and answers as {reply['instance']}"
        raise SyncUnconfirmed(problem, key=server.base_url, remedy="Let one server stand behind each URL.")


def _better(error: RollmatchError, calls: Sequence[RunningCall[Any]]) -> RollmatchError:
    """A transfer that broke says little; the server whose call failed meanwhile may know more."""
    if isinstance(error, TransferFailed):
        for call in calls:
            if call.is_done(within_s=1.0):
                try:
                    call.result()
                except RollmatchError as known:
                    if getattr(known, "code", None) != _LEFT:
                        return known
    return error
