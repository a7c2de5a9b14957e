"""Joins the group and receives weights on a thread of its own, so that the engine goes on with its old ones."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rollmatch.errors import RollmatchError, SyncError
from rollmatch.wire.digest import NUM_DIGEST_BYTES, cut, digest_of
from rollmatch.wire.gloo_group import GO, bind
from rollmatch.wire.worker.groups import Group, open_group, parse_address


class NothingReceived(SyncError):
    """Only what was received can be loaded."""

    code = "communicator-missing"
    status = 409


class DigestMismatch(SyncError):
    """A tensor arrives bit for bit as it was announced."""

    code = "digest-mismatch"
    status = 409


class SyncDropped(SyncError):
    """A transfer goes on until it is complete, unless somebody drops it."""

    code = "sync-dropped"
    status = 409


@dataclass(slots=True)
class _Received:
    """Tensors of the update that is under way."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    dropped: bool = False


class Receiver:
    """One member of one group; jobs run one after the other."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._group: Group | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_begun = 0
        self._num_ended = 0
        self._failure: RollmatchError | None = None
        self._received = _Received()

    @classmethod
    def start(cls, told: dict[str, Any], *, transport: str, device: Any) -> "Receiver":
        """Bind the port if this is rank 0, and begin to join. Errors: ``GroupPortInUse``."""
        address, receiver = parse_address(told), cls(device)
        listener = bind(address.host, address.port) if address.rank == 0 else None

        def join() -> None:
            receiver._group = open_group(address, transport=transport, listener=listener, device=device)

        threading.Thread(target=receiver._work, daemon=True, name="rollmatch-receiver").start()
        receiver._put(join)
        return receiver

    def begin(self, plan: dict[str, Any]) -> None:
        """Receive what ``plan`` announces, after what was begun before."""
        if self._failure is not None:
            raise self._failure
        received = self._received
        self._put(lambda: self._receive(plan, received))

    def poll(self) -> dict[str, Any]:
        """Errors: whatever a job failed with, until ``drop``."""
        if self._failure is not None:
            raise self._failure
        if self._num_ended < self._num_begun:
            return {"state": "busy", "rank": -1 if self._group is None else self._group.rank}
        return {"state": "idle", "digests": dict(self._received.digests)}

    def take(self) -> dict[str, torch.Tensor]:
        """Hand over the tensors, which are forgotten here. Errors: ``NothingReceived``."""
        if self._failure is not None:
            raise self._failure
        if not self._received.tensors:
            raise NothingReceived("nothing was received", remedy="Send the tensors first.")
        taken, self._received = self._received.tensors, _Received()
        return taken

    def put_back(self, tensors: dict[str, torch.Tensor]) -> None:
        """Tensors to be taken next."""
        self._received = _Received(tensors=tensors)

    def drop(self) -> None:
        """Forget what came and what is on its way."""
        self._received.dropped = True
        self._received, self._failure = _Received(), None

    def close(self) -> None:
        """Leave the group, at once or as soon as the thread gets out of it."""
        self.drop()
        self._jobs.put(None)

    def _put(self, job: Callable[[], None]) -> None:
        self._num_begun += 1
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._failure is None:
                    job()
            except SyncDropped:
                pass
            except RollmatchError as error:
                self._failure = error
            finally:
                self._num_ended += 1
        if self._group is not None:
            self._group.close()

    def _receive(self, plan: dict[str, Any], received: _Received) -> None:
        group, tensors = self._group, plan["tensors"]
        assert group is not None
        if sync_id := plan.get("sync_id"):
            group.set_ready(sync_id)
            if group.wait_word(sync_id) != GO:
                raise SyncDropped("the learner dropped the sync", key=sync_id)
        first = 0
        for num_tensors in plan["buckets"]:
            self._receive_bucket(tensors[first : first + num_tensors], received)
            first += num_tensors
        names = [name for name, _, _ in tensors]
        self._check_digests(names, self._announced(plan, group), received)

    def _receive_bucket(self, tensors: list[Any], received: _Received) -> None:
        group = self._group
        assert group is not None
        kinds = [(getattr(torch, dtype), tuple(shape)) for _, dtype, shape in tensors]
        bucket = group.receive(sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in kinds))
        for (name, _, _), tensor in zip(tensors, cut(bucket, kinds), strict=True):
            received.tensors[name] = tensor
            received.digests[name] = digest_of(tensor).hex()

    def _announced(self, plan: dict[str, Any], group: Group) -> list[str] | None:
        if plan.get("trailer"):
            num_tensors = len(plan["tensors"])
            raw = group.receive(num_tensors * NUM_DIGEST_BYTES).numpy().tobytes().hex()
            width = 2 * NUM_DIGEST_BYTES
            return [raw[place * width : (place + 1) * width] for place in range(num_tensors)]
        announced: list[str] | None = plan.get("digests")
        return announced

    def _check_digests(self, names: list[str], announced: list[str] | None, received: _Received) -> None:
        for name, digest in zip(names, announced or (), strict=False):
            if received.digests[name] != digest:
                raise DigestMismatch(
                    f"arrived with digest {received.digests[name]}, announced was {digest}",
                    key=name,
                    remedy="Sync again; if it happens again, look for a tensor that changes while it is sent.",
                )
