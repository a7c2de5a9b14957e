"""Joins the group and receives weights on a thread of its own, so that the engine generates with its old ones."""

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from rollmatch.errors import FAILURES, RollmatchError, SyncError, kind_and_text
from rollmatch.weights.digest import DIRECT, GLOO, NUM_DIGEST_BYTES, DigestMismatch, cut, digest_of_bytes
from rollmatch.weights.finite import check_totals, totals_of
from rollmatch.weights.gloo import Blocks, Completion, GlooGroup, InFlight
from rollmatch.weights.group_address import GroupAddress, TransferFailed, bind
from rollmatch.weights.group_store import GO, GroupStore
from rollmatch.weights.nccl import DirectGroup
from rollmatch.weights.stateless import StatelessGroup
from rollmatch.weights.transfer_plan import TransferPlan

Load = Callable[[Iterator[tuple[str, Tensor]]], object]
STATELESS = "stateless"
TRANSPORTS = (GLOO, DIRECT, STATELESS)


class SyncDropped(SyncError):
    """A transfer was dropped before it was complete."""

    code = "sync-dropped"


class ReceivingGroup(Protocol):
    """A group, as a worker uses it; the learner is the source of every broadcast."""

    rank: int

    def begin(self, memory: Tensor) -> Completion:
        """Receive the next broadcast into ``memory``; what is returned waits for it. Errors: ``TransferFailed``."""

    def close(self) -> None:
        """Leave."""


@dataclass(slots=True)
class Received:
    """Tensors of the update that is under way."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    blocks: list[Tensor] = field(default_factory=list)
    """The memory that the tensors lie in."""
    digests: dict[str, str] = field(default_factory=dict)
    num_tensors: int = 0
    """That were announced, with those that are merged from them."""
    merged: frozenset[str] | None = None
    """Names of merged weights, where an adapter was received: all others are the base's. Else None."""
    dropped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far joining and receiving are."""

    share: float | None
    """Of the announced tensors, that has arrived; None: nothing is under way."""
    digests: dict[str, str]
    """Of all that has arrived, in hexadecimal, by name; empty while something is under way."""

    @property
    def is_busy(self) -> bool:
        """Whether something is under way."""
        return self.share is not None


class Receiver:
    """One member of one group; jobs run one after the other."""

    def __init__(self) -> None:
        self._group: ReceivingGroup | DirectGroup | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_begun = 0
        self._num_ended = 0
        self._ended = threading.Condition()
        self._failure: RollmatchError | None = None
        self._received = Received()
        self._known: TransferPlan | None = None
        """The last plan that may be named again."""
        self._blocks = Blocks()
        self._lent: list[Tensor] = []
        self.reload: Load | None = None
        """How weights get into a model that vLLM quantizes: all at once. None: it does not."""
        self._left = threading.Event()
        """Set when the group is of no more use, also while it is being joined."""
        self._thread = threading.Thread(target=self._work, daemon=True, name="rollmatch-receiver")

    @classmethod
    def start(cls, address: GroupAddress, *, transport: str, device: torch.device) -> "Receiver":
        """Bind the port if this is rank 0, and begin to join. Errors: ``GroupPortInUse``."""
        listener = bind(address.host, address.port) if address.rank == 0 else None
        if transport == STATELESS:
            left = threading.Event()
            receiver = cls.joining(
                lambda: StatelessGroup(address, listener=listener, device=device, source=address.source, is_left=left)
            )
            receiver._left = left
            return receiver
        return cls.joining(lambda: GlooGroup.open(address, listener=listener))

    @classmethod
    def joining(cls, open_it: Callable[[], ReceivingGroup | DirectGroup]) -> Self:
        """Begin to join the group that ``open_it`` opens."""
        receiver = cls()

        def join() -> None:
            receiver._group = open_it()

        receiver._thread.start()
        receiver._put(join)
        return receiver

    def known_plan(self, sync_id: str, *, like: str) -> TransferPlan:
        """The plan that was received as ``like``, for another sync. Errors: ``communicator-missing``."""
        if self._known is None or self._known.sync_id != like:
            raise SyncError(
                f"no plan {like} is known",
                code="communicator-missing",
                key="like",
                remedy="Announce the tensors themselves.",
            )
        return replace(self._known, sync_id=sync_id)

    def begin(self, plan: TransferPlan) -> None:
        """Receive what ``plan`` announces, after what was begun before."""
        if self._failure is not None:
            raise self._failure
        if plan.may_repeat and (self._known is None or plan.tensors is not self._known.tensors):
            self._known = plan
        received = self._received
        received.num_tensors = len(plan.tensors) + (len(plan.merge.merges) if plan.merge else 0)

        def receive() -> None:
            try:
                self._receive(plan, received)
            except DigestMismatch:
                if not received.dropped:  # else another worker has reported it, and the next update is not to blame
                    raise

        self._put(receive)

    def wait(self, within_s: float | None) -> None:
        """Until nothing is under way, for so long at most; None: as long as it takes."""
        with self._ended:
            self._ended.wait_for(lambda: self._num_ended == self._num_begun, timeout=within_s)

    def progress(self) -> Progress:
        """Errors: whatever a job failed with, until ``drop``."""
        if self._failure is not None:
            raise self._failure
        received = self._received
        if self._num_ended < self._num_begun:
            return Progress(share=len(received.digests) / max(1, received.num_tensors), digests={})
        return Progress(share=None, digests=dict(received.digests))

    def take(self) -> dict[str, Tensor]:
        """Hand over the tensors; their memory is used again after ``load_into``. Errors: ``communicator-missing``."""
        if self._failure is not None:
            raise self._failure
        if not self._received.tensors:
            raise SyncError("nothing was received", code="communicator-missing", remedy="Send the tensors first.")
        taken, self._received = self._received, Received()
        self._lent += taken.blocks
        return taken.tensors

    def load_into(self, model: nn.Module, *, aliases: Collection[str] = ()) -> None:
        """Load what was received, except tied tensors, which come with what they are tied to.

        Errors: ``communicator-missing``, ``weights-broken``.
        """
        tensors = {name: tensor for name, tensor in self.take().items() if name not in aliases}
        load_by(self.reload or model.load_weights, tensors)
        kept = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        lent, self._lent = self._lent, []  # a loader may keep a tensor as it is; other memory is used again
        self._blocks.give_back([block for block in lent if block.untyped_storage().data_ptr() not in kept])

    def free_block(self, num_bytes: int) -> Tensor:
        """[num_bytes] memory of earlier syncs, if there is any of this size; for what is put back."""
        return self._blocks.take(num_bytes)

    def put_back(self, received: Received) -> None:
        """What is to be taken next."""
        self._received = received

    @property
    def merged(self) -> frozenset[str] | None:
        """Names of the merged weights among what would be taken next; None where all weights were received."""
        return self._received.merged

    def drop(self) -> None:
        """Forget what has arrived and what is on its way."""
        self._received.dropped = True
        self._received, self._failure = Received(), None

    def close(self) -> None:
        """Leave the group, at once or as soon as the thread is out of it."""
        self.drop()
        self._left.set()
        self._jobs.put(None)

    @property
    def is_in_group(self) -> bool:
        """Whether the thread has not left the group yet; until then the group's port may be taken."""
        return self._thread.is_alive()

    def has_lost_a_member(self) -> bool:
        """Whether a group that had come about lacks its learner; only workers that share a store with it know."""
        group = self._group
        return isinstance(group, StatelessGroup) and group.sees_the_learner() and not group.is_whole()

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
            except FAILURES as error:  # the thread must live on, or the next sync would wait for ever
                problem = kind_and_text(error)
                self._failure = TransferFailed(problem, key="receive", remedy="Look at the server's output.")
            finally:
                with self._ended:
                    self._num_ended += 1
                    self._ended.notify_all()
        if self._group is not None:
            self._group.close()

    def _receive(self, plan: TransferPlan, received: Received) -> None:
        assert self._group is not None
        assert not isinstance(self._group, DirectGroup)
        if plan.sync_id is not None:
            assert isinstance(self._group, GlooGroup)
            wait_go(self._group.store, plan.sync_id)
        in_flight, first, totals = InFlight(self._group.begin), 0, list[Tensor]()
        for num_tensors in plan.buckets:
            self._begin_bucket(plan, slice(first, first + num_tensors), in_flight, received, totals)
            first += num_tensors
        trailer = torch.empty(len(plan.tensors) * NUM_DIGEST_BYTES * plan.digests_follow, dtype=torch.uint8)
        if plan.digests_follow:
            in_flight.add(trailer)
        in_flight.wait()
        announced = _digests_in(trailer) if plan.digests_follow else plan.digests or ()
        names = [spec.name for spec in plan.tensors]
        check_announced(names, announced, received)
        check_totals(names, torch.cat(totals))

    def _begin_bucket(
        self, plan: TransferPlan, place: slice, in_flight: InFlight, received: Received, totals: list[Tensor]
    ) -> None:
        """``totals`` gets ``totals_of`` the tensors as soon as they are here."""
        specs = plan.tensors[place]
        sizes = [spec.num_bytes for spec in specs]
        block = self._blocks.take(sum(sizes))
        received.blocks.append(block)

        def keep() -> None:
            names = [spec.name for spec in specs]
            received.tensors |= dict(zip(names, cut(block, [spec.kind for spec in specs]), strict=True))
            for name in set(plan.swapped).intersection(names):
                tensor = received.tensors[name]
                received.tensors[name] = tensor.view(tensor.mT.shape).mT.contiguous()
            digests = map(digest_of_bytes, torch.split(block, sizes))
            received.digests |= {name: digest.hex() for name, digest in zip(names, digests, strict=True)}
            totals.append(totals_of([received.tensors[name] for name in names]))

        in_flight.add(block, then=keep)


@torch.no_grad()
def load_by(load: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """All tensors, by checkpoint name. Errors: ``weights-broken``; the model may then hold a mixture."""
    try:
        load(iter(tensors.items()))
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise SyncError(
            f"vLLM's loader: {kind_and_text(error)}",
            code="weights-broken",
            key="load",
            remedy="Run a full sync; if it fails again, restart the server.",
        ) from error


def check_announced(names: Sequence[str], announced: Sequence[str], received: Received) -> None:
    """Errors: ``DigestMismatch``."""
    for name, digest in zip(names, announced, strict=False):
        if received.digests[name] != digest:
            problem = f"arrived with digest {received.digests[name]}, announced was {digest}"
            remedy = "Sync again; if it happens again, look for a tensor that changes while it is sent."
            raise DigestMismatch(problem, key=name, remedy=remedy)


def wait_go(store: GroupStore, sync_id: str) -> None:
    """Announce readiness and wait for the learner's verdict. Errors: ``SyncDropped``, ``TransferFailed``."""
    store.set_ready(sync_id)
    if store.wait_verdict(sync_id) != GO:
        raise SyncDropped("the learner dropped the sync", key=sync_id)


def _digests_in(trailer: Tensor) -> list[str]:
    """One per tensor, in hexadecimal.

    >>> _digests_in(torch.arange(32, dtype=torch.uint8))[1]
    '101112131415161718191a1b1c1d1e1f'
    """
    return [bytes(part).hex() for part in trailer.view(-1, NUM_DIGEST_BYTES).numpy()]
