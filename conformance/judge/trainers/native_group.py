"""The native dialect's group: one call announces an update, whose digests prove it before it is served."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError

from conformance.judge.servers.broken.engine import LONGEST
from conformance.judge.servers.broken.updates import LIMIT_S, RejectedUpdate
from conformance.judge.trainers.plugged_group import wait_for
from conformance.judge.trainers.updates import RecordedUpdates
from rollmatch.errors import RollmatchError
from rollmatch.server.announced import specs_of
from rollmatch.server.identity import load_model_identity
from rollmatch.server.payloads import (
    CommunicatorClose,
    CommunicatorRequest,
    Identity,
    SyncAgain,
    SyncChoice,
    SyncReply,
    SyncRequest,
)
from rollmatch.weights.digest import DIGEST_KINDS, GLOO
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.transfer_plan import TransferPlan
from rollmatch.weights.worker.receiver import Receiver

_Message = TypeVar("_Message", bound=BaseModel)
Body = Mapping[str, Any]


class NativeGroup:
    """One learner at a time, over gloo. Every method takes a call's body, and raises ``RejectedUpdate``."""

    def __init__(self, updates: RecordedUpdates, instance: str) -> None:
        """``instance``: new at every start."""
        self.updates, self.instance, self.client = updates, instance, ""
        self._receiver: Receiver | None = None
        self._limit_s = LIMIT_S
        self._staged: SyncRequest | None = None
        self._known: SyncRequest | None = None
        """The last one that was announced in full and served, so that it may be named again."""
        self._digests: dict[str, str] = {}

    def identity(self) -> dict[str, Any]:
        """What ``/native/identity/`` answers."""
        model = load_model_identity(self.updates.engine.directory, dtype=self.updates.dtype)
        return Identity(
            instance=self.instance,
            model=model.directory,
            model_digest=model.digest,
            policy_version=self.updates.version,
            tensors=tuple(model.tensors.values()),
            aliases=model.aliases,
            tensor_parallel_size=1,
            data_parallel_size=1,
            world_size=1,
            max_model_len=LONGEST,
            vllm_version="none",
            transports=(GLOO,),
            digest=DIGEST_KINDS[GLOO],
            adapter_merge=False,
            keep=False,
        ).model_dump()

    def join(self, body: Body) -> dict[str, Any]:
        """Hold the group's store, and wait until all have joined."""
        request = _read(CommunicatorRequest, body)
        is_replaced = request.replace and request.client == self.client
        if self._receiver is not None and not is_replaced:
            raise RejectedUpdate(f"client-already-attached: {self.client}")
        if request.transport != GLOO:
            raise RejectedUpdate(f"transport-unknown: {request.transport}; this server has {GLOO}")
        if request.rank_offset + 1 >= request.world_size:
            raise RejectedUpdate(f"world-size-mismatch: one worker and a learner are more than {request.world_size}")
        self.leave()
        address = GroupAddress(
            host=request.host,
            port=request.port,
            rank=request.rank_offset,
            world_size=request.world_size,
            secret=request.secret,
            timeout_s=request.timeout_s,
            join_timeout_s=request.join_timeout_s,
        )
        try:
            self._receiver = Receiver.start(address, transport=GLOO, device=torch.device("cpu"))
        except RollmatchError as error:
            raise RejectedUpdate(str(error)) from error
        self.client, self._limit_s = request.client, request.timeout_s + LIMIT_S
        try:
            wait_for(self._receiver, request.join_timeout_s + LIMIT_S)
        except RejectedUpdate:
            self.leave()
            raise
        return {"ranks": [address.rank], "transport": GLOO}

    def close(self, body: Body) -> dict[str, Any]:
        request, was_open = _read(CommunicatorClose, body), self._receiver is not None
        if was_open and not request.force:
            self._attached(request.client)
        self.leave()
        return {"closed": was_open}

    def sync(self, body: Body) -> dict[str, Any]:
        """Receive what is announced, and serve it where the call says so."""
        return self._take(_read(SyncRequest, body))

    def sync_again(self, body: Body) -> dict[str, Any]:
        """The same tensors in the same buckets as an earlier one."""
        again = _read(SyncAgain, body)
        if self._known is None or self._known.sync_id != again.like:
            raise RejectedUpdate(f"announcement-unknown: {again.like}")
        return self._take(self._known.model_copy(update=again.model_dump(exclude={"like"})))

    def commit(self, body: Body) -> dict[str, Any]:
        choice, staged = _read(SyncChoice, body), self._staged
        self._attached(choice.client)
        if staged is None or choice.sync_id not in (None, staged.sync_id):
            raise RejectedUpdate("nothing-staged")
        self.updates.finish()
        self.updates.version = staged.version
        if self._known is None or staged.tensors is not self._known.tensors:
            self._known = staged
        self._staged = None
        return self._reply(staged, is_committed=True)

    def drop(self, body: Body) -> dict[str, Any]:
        receiver, had_any = self._attached(_read(SyncChoice, body).client), self.updates.is_open
        receiver.drop()
        self._forget()
        return {"dropped": had_any}

    def leave(self) -> None:
        """Whatever is under way."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = self._known = None
        self._forget()

    def _forget(self) -> None:
        self._staged = None
        self.updates.drop()

    def _attached(self, client: str) -> Receiver:
        if self._receiver is None or client != self.client:
            raise RejectedUpdate("communicator-missing" if self._receiver is None else "client-already-attached")
        return self._receiver

    def _take(self, request: SyncRequest) -> dict[str, Any]:
        """Which tensors come is noted, not refused."""
        receiver = self._attached(request.client)
        if request.adapter is not None:
            raise RejectedUpdate("adapter-invalid: trainers are judged by whole updates; set sync.mode to full")
        if self.updates.is_open:
            raise RejectedUpdate("update-in-progress")
        if request.version <= self.updates.version:
            raise RejectedUpdate(f"version-not-newer: {request.version}, served is {self.updates.version}")
        if sum(request.buckets) != len(request.tensors):
            raise RejectedUpdate(f"bucket-invalid: {sum(request.buckets)} of {len(request.tensors)} tensors")
        specs = specs_of(request.tensors)
        self.updates.check(*zip(*((spec.name, spec.shape, spec.dtype) for spec in specs), strict=True))
        plan = TransferPlan(
            tensors=specs,
            buckets=request.buckets,
            sync_id=request.sync_id,
            digests=request.digests,
            digests_follow=request.digests is None,
        )
        self._digests = self._received(receiver, plan)
        self._staged = request
        return self.commit({"client": request.client}) if request.commit else self._reply(request, is_committed=False)

    def _received(self, receiver: Receiver, plan: TransferPlan) -> dict[str, str]:
        """Stage it. Returns the digests."""
        try:
            receiver.begin(plan)
            digests = wait_for(receiver, self._limit_s)
            self.updates.stage({name: tensor.clone() for name, tensor in receiver.take().items()})
        except (RollmatchError, RejectedUpdate) as error:
            receiver.drop()
            self._forget()
            raise RejectedUpdate(str(error)) from error
        return digests

    def _reply(self, request: SyncRequest, *, is_committed: bool) -> dict[str, Any]:
        return SyncReply(
            instance=self.instance,
            policy_version=self.updates.version,
            committed=is_committed,
            digests=tuple(self._digests[spec.name] for spec in request.tensors),
            receive_s=0.0,
        ).model_dump()


def _read(kind: type[_Message], body: Body) -> _Message:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise RejectedUpdate(f"body-invalid: {error}") from error
