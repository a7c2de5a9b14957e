"""Weights to servers of the native dialect: one control call each, one broadcast for all.

Over gloo several servers stage first and commit when all have proven what they hold, so that one that fails leaves
the others on the old version; weights in place are committed by each server as soon as it has proven them. With
``stage``, all weights are staged by either transport. Staged adapters are merged on both sides at once. A sync that
failed half-way leaves no group behind; the next opens another.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypedDict

from torch import Tensor

from rollmatch.dialects.calls import BackgroundCall
from rollmatch.dialects.http import MSGPACK, HttpReply, RunningCall, raise_failures
from rollmatch.dialects.native.group import (
    AUTO,
    LearnerGroup,
    Rendezvous,
    ServerIdentity,
    choose_transport,
    read_identity,
)
from rollmatch.dialects.reply import Version, read_as
from rollmatch.dialects.sender import WeightSender
from rollmatch.dialects.session import RolloutServer
from rollmatch.errors import RollmatchError, SyncError
from rollmatch.weights.digest import DigestMismatch, check_digests
from rollmatch.weights.group_address import TransferFailed
from rollmatch.weights.group_store import DROP, GO
from rollmatch.weights.named_weights import Adapter
from rollmatch.weights.plan import Merge, OutgoingWeights, Plan, Spec, WeightTransfer, fit

SYNC, AGAIN = "/native/sync", "/native/sync/again"
COMMIT, DROP_STAGED = "/native/sync/commit", "/native/sync/drop"
_REPLY_TIMEOUT_S, _GRACE_S = 600.0, 5.0
_READY_WAIT_S, _DOUBT_S = 0.005, 0.05
"""Until the next look at the calls: the store is in a worker's process, which questions would keep from getting ready.
After ``_DOUBT_S`` without a reply, the health of servers is requested."""
_LEFT = "communicator-missing"
"""Code of a server for a sync whose group the learner itself has left."""


class _Reply(TypedDict, total=False):
    """What a server says of a sync or a commit; what it leaves out proves nothing."""

    digests: list[str]
    merged_digests: dict[str, str] | None
    committed: bool
    policy_version: Version
    instance: str


class _Known(NamedTuple):
    """An announcement that may be named again."""

    plan: Plan
    merges: tuple[Merge, ...]
    sync_id: str


class NativeSender(WeightSender):
    """Rank 0's way to its servers; opens the group when it first sends."""

    def __init__(  # noqa: PLR0913  # what a sync may be like
        self,
        servers: Sequence[RolloutServer],
        rendezvous: Rendezvous,
        *,
        bucket_bytes: int | None = None,
        transport: str = AUTO,
        stage: bool,
        keep: bool = False,
    ) -> None:
        """``transport``: ``gloo``, ``direct``, or ``auto``: ``direct`` if both sides have GPUs. Each can ``stage``.

        ``keep``: new weights write the rest of responses under way.
        """
        self.servers, self.rendezvous, self.bucket_bytes = tuple(servers), rendezvous, bucket_bytes
        self.wanted, self.stage, self.keep = transport, stage, keep
        self._group: LearnerGroup | None = None
        self._identities: tuple[ServerIdentity, ...] = ()
        self._plans: dict[object, Plan] = {}
        self._known: _Known | None = None
        """What all servers of the open group know."""
        self._numbers = count()
        self._has_begun = False
        """Whether the bytes of the last transfer were allowed."""

    @property
    def transport(self) -> str:
        """That of the open group; empty without one."""
        return "" if self._group is None else self._group.transport.name

    @property
    def instances(self) -> tuple[str, ...] | None:
        """What each server called itself when its group was opened."""
        return tuple(identity.instance for identity in self._identities) or None

    def check(self, specs: Sequence[Spec]) -> bool:
        """Compare tensors with those that each server holds, before any group is opened. Errors: those of ``fit``."""
        for server in self.servers:
            held = read_identity(server)
            fit(specs, held.tensors, held.aliases, server=server.base_url)
        return True

    def send(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """All weights, as one version. Errors: those of ``plan``, ``gloo`` and ``digest``, and the servers' own."""
        self._send(OutgoingWeights.of(weights), None, version)

    def send_adapter(self, adapter: Adapter, *, version: int) -> None:
        """An adapter, merged by the servers and proven by the digests of the learner's own merge. Errors as above."""
        self._send(OutgoingWeights.of(adapter.tensors), adapter, version)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def _send(self, weights: OutgoingWeights, adapter: Adapter | None, version: int) -> None:
        """By the open group; once more by a new one where it was of no use, because a server was started again.

        What ranks gather can be sent only once, so that is noticed before. A transfer that broke under way is an error,
        however soon its server is back: the caller repeats it as a newer version, and says so.
        """
        known = self.instances if self._group is not None else None
        if weights.is_gathered and known is not None and self._is_changed(known):
            self.close()
        try:
            self._transfer(weights, adapter, version)
        except RollmatchError:
            if weights.is_gathered or self._has_begun or known is None or not self._is_changed(known):
                raise
            self._transfer(weights, adapter, version)

    def _open(self, weights: OutgoingWeights) -> LearnerGroup:
        """The open group, or a new one."""
        if self._group is None:
            self._identities = tuple(read_identity(server) for server in self.servers)
            self._plans, self._known = {}, None
            transport = choose_transport(self.servers, self._identities, self.wanted)
            held = weights.weights if weights.is_held else ()
            self._group = LearnerGroup(self.servers, self._identities, self.rendezvous, transport, held)
        return self._group

    def _is_changed(self, known: tuple[str, ...]) -> bool:
        """Whether one of the servers is another process than it was; not where one does not answer."""
        try:
            return tuple(server.instance() for server in self.servers) != known
        except RollmatchError:
            return False

    def _plan(self, group: LearnerGroup, weights: OutgoingWeights, *, whole: bool) -> Plan:
        """Made once for the same tensors; ``whole`` compares them with what each server holds."""
        key = weights.specs, weights.is_held
        found = self._plans.get(key)
        if found is None:
            fitted = list(weights.specs)
            for server, identity in zip(self.servers if whole else (), self._identities, strict=False):
                fitted = fit(fitted, identity.tensors, identity.aliases, server=server.base_url)
            size, tail = self.bucket_bytes or group.transport.bucket_bytes, group.transport.tail_bytes
            found = self._plans[key] = weights.plan(fitted, bucket_bytes=size, tail_bytes=tail)
        return found

    def _transfer(self, weights: OutgoingWeights, adapter: Adapter | None, version: int) -> None:
        self._has_begun = False
        group = self._open(weights)
        plan = self._plan(group, weights, whole=adapter is None)
        transfer = weights.transfer(plan)
        if adapter is not None:
            transfer = replace(transfer, merges=adapter.merges, merged=adapter.merged)
        sync_id = f"{version}-{next(self._numbers)}"
        route, body = self._announcement(group, transfer, sync_id, version)
        calls = [_begin(server, route, body) for server in self.servers]
        try:
            self._wait_ready(group, sync_id, calls)
            digests = group.source.send(transfer, partial(raise_failures, calls))
            replies = self._read(route, calls)
            self._check(transfer, digests, replies)
            if not body["commit"]:
                replies = self._commit(sync_id)
        except RollmatchError as error:
            self._give_up(sync_id)
            cause = _cause_of(error, calls)
            if cause is error:
                raise
            raise cause from error
        if route == SYNC:
            self._known = _Known(plan, transfer.merges, sync_id)
        for server, identity, reply in zip(self.servers, self._identities, replies, strict=True):
            _check_committed(server, reply, version)
            _check_instance(server, reply, identity.instance)

    def _announcement(
        self, group: LearnerGroup, transfer: WeightTransfer, sync_id: str, version: int
    ) -> tuple[str, dict[str, object]]:
        """Route and body: all tensors, or the name under which all servers know them."""
        is_simple = len(self.servers) == 1 and not transfer.is_adapter
        commit = is_simple if group.transport.stages else transfer.is_adapter or not self.stage
        body = {"client": self.rendezvous.client, "sync_id": sync_id, "version": version, "commit": commit}
        if self.keep:
            body |= {"keep": True}
        known, may_name = self._known, all(AGAIN in one.routes for one in self.servers)
        if known and may_name and known.plan is transfer.plan and known.merges == transfer.merges:
            return AGAIN, body | {"like": known.sync_id}
        merges = [asdict(merge) for merge in transfer.merges]
        return SYNC, body | {
            "tensors": [{"name": s.name, "dtype": s.dtype, "shape": list(s.shape)} for s in transfer.plan.specs],
            "buckets": [bucket.stop - bucket.start for bucket in transfer.plan.buckets],
            "digests": None,  # they follow the tensors
            "adapter": {"merges": merges} if merges else None,  # digests of the learner's merge follow, too
        }

    def _wait_ready(self, group: LearnerGroup, sync_id: str, calls: Sequence[RunningCall[HttpReply]]) -> None:
        """Allow the bytes once every worker is ready; a server that refuses costs the others nothing.

        Errors: that of the first call that ended with one, ``sync-not-ready``.
        """
        store, limit_s = group.source.store, self.rendezvous.timeout_s
        began, doubts = time.monotonic(), list[RunningCall[object]]()
        try:
            while not store.is_ready(sync_id, range(group.rank), within_s=_READY_WAIT_S):
                raise_failures([*calls, *doubts])
                if not doubts and time.monotonic() > began + _DOUBT_S:
                    doubts = [BackgroundCall(server.instance) for server in self.servers]
                if time.monotonic() > began + limit_s:
                    problem = f"some worker was not ready for the weights within {limit_s:g} s"
                    raise SyncError(problem, code="sync-not-ready", key=sync_id, remedy="Look at the servers' output.")
        except RollmatchError:
            with suppress(TransferFailed):  # with the first server its store is gone, too
                store.give_verdict(sync_id, DROP)
            raise
        self._has_begun = True  # before a server can know: it may be gone before this returns
        store.give_verdict(sync_id, GO)

    def _check(self, transfer: WeightTransfer, digests: Sequence[str], replies: Sequence[_Reply]) -> None:
        names = [spec.name for spec in transfer.plan.specs]
        merged = dict(zip((merge.name for merge in transfer.merges), digests[len(names) :], strict=True))
        for server, reply in zip(self.servers, replies, strict=True):
            check_digests(names, digests[: len(names)], reply.get("digests", []), server=server.base_url)
            _check_merged(merged, reply, server)

    def _commit(self, sync_id: str) -> list[_Reply]:
        body = {"client": self.rendezvous.client, "sync_id": sync_id}
        return self._read(COMMIT, [_begin(server, COMMIT, body) for server in self.servers])

    def _read(self, route: str, calls: Sequence[RunningCall[HttpReply]]) -> list[_Reply]:
        """The replies of all servers. Errors: those of the calls."""
        bodies = [call.result().body for call in calls]
        pairs = zip(bodies, self.servers, strict=True)
        return [read_as(_Reply, body, route=route, base_url=server.base_url) for body, server in pairs]

    def _give_up(self, sync_id: str) -> None:
        """Drop what is staged and leave; the servers keep their old weights."""
        body = {"client": self.rendezvous.client, "sync_id": sync_id}
        calls = [BackgroundCall(partial(_ask_to_drop, server, body)) for server in self.servers]
        for call in calls:
            call.is_done(within_s=_GRACE_S)  # all run at once, each with this limit
        self.close()


def _begin(server: RolloutServer, route: str, body: dict[str, Any]) -> RunningCall[HttpReply]:
    return server.http.begin(f"{route}/", body, timeout_s=_REPLY_TIMEOUT_S, content_type=MSGPACK)


def _ask_to_drop(server: RolloutServer, body: dict[str, Any]) -> Any:
    return server.control(DROP_STAGED, body, timeout_s=_GRACE_S, content_type=MSGPACK)


def _check_merged(merged: Mapping[str, str], reply: _Reply, server: RolloutServer) -> None:
    """What is served is bit for bit the learner's own merge."""
    held = reply.get("merged_digests") or {}
    for name, digest in merged.items():
        if held.get(name) != digest:
            problem = f"{name}, merged, has digest {digest} here and {held.get(name)} on {server.base_url}"
            raise DigestMismatch(problem, key=name, remedy="Set sync.mode to full.")


def _check_committed(server: RolloutServer, reply: _Reply, version: int) -> None:
    if reply.get("committed") is not True or reply.get("policy_version") != version:
        problem = f"{server.base_url} serves version {reply.get('policy_version')}, {version} was sent"
        raise SyncError(
            problem, code="sync-unconfirmed", key=server.base_url, remedy="Look at the server's output and sync again."
        )


def _check_instance(server: RolloutServer, reply: _Reply, instance: str) -> None:
    """The replying process is the one that joined: no other health call is needed after a sync."""
    if reply.get("instance", instance) != instance:
        problem = f"{server.base_url} was {instance} and answers as {reply['instance']}"
        raise SyncError(
            problem, code="sync-unconfirmed", key=server.base_url, remedy="Let one server stand behind each URL."
        )


def _cause_of(error: RollmatchError, calls: Sequence[RunningCall[object]]) -> RollmatchError:
    """A broken transfer says little; the server whose call failed meanwhile may know more."""
    if isinstance(error, TransferFailed):
        for call in calls:
            if call.is_done(within_s=1.0):
                try:
                    call.result()
                except RollmatchError as known:
                    if known.code != _LEFT:
                        return known
    return error
