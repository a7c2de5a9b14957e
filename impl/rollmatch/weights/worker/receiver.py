"""Joins the group and receives weights on a thread of its own, so that the engine goes on with its old ones."""

import queue
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from rollmatch.errors import RollmatchError, SyncError
from rollmatch.weights.digest import NUM_DIGEST_BYTES, cut, digest_of_bytes
from rollmatch.weights.flight import Flight
from rollmatch.weights.gloo_group import GO, bind
from rollmatch.weights.worker.blocks import Blocks
from rollmatch.weights.worker.groups import open_group, parse_address


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
    blocks: list[torch.Tensor] = field(default_factory=list)
    """The memory that the tensors lie in."""
    digests: dict[str, str] = field(default_factory=dict)
    num_tensors: int = 0
    """That were announced."""
    dropped: bool = False


class Receiver:
    """One member of one group; jobs run one after the other."""

    def __init__(self) -> None:
        self._group: Any = None
        """A ``Group``, or what a subclass needs."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_begun = 0
        self._num_ended = 0
        self._ended = threading.Condition()
        self._failure: RollmatchError | None = None
        self._received = _Received()
        self._kept: dict[str, Any] = {}
        """The last plan that may be named again."""
        self._blocks = Blocks()
        self._lent: list[torch.Tensor] = []

    @classmethod
    def start(cls, told: dict[str, Any], *, transport: str, device: Any) -> "Receiver":
        """Bind the port if this is rank 0, and begin to join. Errors: ``GroupPortInUse``."""
        address = parse_address(told)
        listener = bind(address.host, address.port) if address.rank == 0 else None
        return cls.joining(lambda: open_group(address, transport=transport, listener=listener, device=device))

    @classmethod
    def joining(cls, open_it: Callable[[], Any]) -> Self:
        """Begin to join the group that ``open_it`` opens."""
        receiver = cls()

        def join() -> None:
            receiver._group = open_it()

        threading.Thread(target=receiver._work, daemon=True, name="rollmatch-receiver").start()
        receiver._put(join)
        return receiver

    def whole(self, plan: dict[str, Any]) -> dict[str, Any]:
        """A plan that is ``like`` an earlier one, in full. Errors: ``NothingReceived``."""
        like = plan.get("like")
        if like is not None:
            if self._kept.get("sync_id") != like:
                raise NothingReceived(f"no plan {like} is known", key="like", remedy="Announce the tensors themselves.")
            return self._kept | {"sync_id": plan["sync_id"]}
        if plan.get("keep"):
            self._kept = plan
        return plan

    def begin(self, plan: dict[str, Any]) -> None:
        """Receive what ``plan`` announces, after what was begun before."""
        if self._failure is not None:
            raise self._failure
        received = self._received
        received.num_tensors = len(plan["tensors"])

        def receive() -> None:
            try:
                self._receive(plan, received)
            except DigestMismatch:
                if not received.dropped:  # another worker told it first; the next update is not to be blamed for it
                    raise

        self._put(receive)

    @property
    def has_failed(self) -> bool:
        """Whether a job failed since the last ``drop``."""
        return self._failure is not None

    def wait(self, within_s: float) -> None:
        """Until nothing is under way, for so long at most."""
        with self._ended:
            self._ended.wait_for(lambda: self._num_ended == self._num_begun, timeout=within_s)

    def poll(self) -> dict[str, Any]:
        """Errors: whatever a job failed with, until ``drop``."""
        if self._failure is not None:
            raise self._failure
        if self._num_ended < self._num_begun:
            rank, received = -1 if self._group is None else self._group.rank, self._received
            return {"state": "busy", "rank": rank, "share": len(received.digests) / max(1, received.num_tensors)}
        return {"state": "idle", "digests": dict(self._received.digests)}

    def take(self) -> dict[str, torch.Tensor]:
        """Hand over the tensors, whose memory is not written to before ``reuse``. Errors: ``NothingReceived``."""
        if self._failure is not None:
            raise self._failure
        if not self._received.tensors:
            raise NothingReceived("nothing was received", remedy="Send the tensors first.")
        taken, self._received = self._received, _Received()
        self._lent += taken.blocks
        return taken.tensors

    def reuse(self, kept: Collection[int]) -> None:
        """All tensors handed over are read no more, but for those in memory at the addresses ``kept``."""
        lent, self._lent = self._lent, []
        self._blocks.give_back([block for block in lent if block.untyped_storage().data_ptr() not in kept])

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
                with self._ended:
                    self._num_ended += 1
                    self._ended.notify_all()
        if self._group is not None:
            self._group.close()

    def _receive(self, plan: dict[str, Any], received: _Received) -> None:
        tensors, group = plan["tensors"], self._group
        assert group is not None
        wait_go(group, plan)
        flight, first = Flight(group.begin), 0
        for num_tensors in plan["buckets"]:
            self._begin_bucket(tensors[first : first + num_tensors], flight, received)
            first += num_tensors
        trailer = torch.empty(len(tensors) * NUM_DIGEST_BYTES if plan.get("trailer") else 0, dtype=torch.uint8)
        if len(trailer):
            flight.add(trailer)
        flight.land()
        names = [name for name, _, _ in tensors]
        self._check_digests(names, _digests_in(trailer) if len(trailer) else plan.get("digests"), received)

    def _begin_bucket(self, tensors: list[Any], flight: Flight, received: _Received) -> None:
        kinds = [(getattr(torch, dtype), tuple(shape)) for _, dtype, shape in tensors]
        sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in kinds]
        block = self._blocks.take(sum(sizes))
        received.blocks.append(block)

        def keep() -> None:
            names = [name for name, _, _ in tensors]
            received.tensors |= dict(zip(names, cut(block, kinds), strict=True))
            digests = map(digest_of_bytes, torch.split(block, sizes))
            received.digests |= {name: digest.hex() for name, digest in zip(names, digests, strict=True)}

        flight.add(block, then=keep)

    def _check_digests(self, names: list[str], announced: list[str] | None, received: _Received) -> None:
        for name, digest in zip(names, announced or (), strict=False):
            if received.digests[name] != digest:
                raise DigestMismatch(
                    f"arrived with digest {received.digests[name]}, announced was {digest}",
                    key=name,
                    remedy="Sync again; if it happens again, look for a tensor that changes while it is sent.",
                )


def wait_go(group: Any, plan: dict[str, Any]) -> None:
    """Where there is a hand-shake, wait for the learner's word. Errors: ``SyncDropped``, ``TransferFailed``."""
    if sync_id := plan.get("sync_id"):
        group.set_ready(sync_id)
        if group.wait_word(sync_id) != GO:
            raise SyncDropped("the learner dropped the sync", key=sync_id)


def _digests_in(trailer: torch.Tensor) -> list[str]:
    """One per tensor, in hexadecimal.

    >>> _digests_in(torch.arange(32, dtype=torch.uint8))[1]
    '101112131415161718191a1b1c1d1e1f'
    """
    return [bytes(part).hex() for part in trailer.view(-1, NUM_DIGEST_BYTES).numpy()]
