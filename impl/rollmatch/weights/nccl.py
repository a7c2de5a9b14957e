"""The direct transport: weights straight into the memory they are used in, by NCCL between GPUs, by gloo without.

Members use the store of a gloo group, which also says who is ready; NCCL is opened on the same store. An allowed
import of vllm, whose NCCL binding both sides use.
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from rollmatch.errors import RollmatchError, SyncError, first_line
from rollmatch.weights.digest import add_mixed, add_mixed_in, add_mixed_of_each, bytes_of, mixed_digests
from rollmatch.weights.gloo import GlooGroup, broadcast_all
from rollmatch.weights.group_address import GroupAddress, TransferFailed
from rollmatch.weights.group_store import GroupStore
from rollmatch.weights.plan import Bucket, Spec, WeightTransfer

NVLS = "NCCL_NVLS_ENABLE"
"""Multicast in the switch of a machine: it fails on some virtual machines, and a broadcast is no faster by it."""
BUCKET_BYTES = 2**30
"""Digests of one bucket are made while the next one travels."""
TAIL_BYTES = 2**26
"""Of the last bucket, whose digests are made while nothing travels."""
MERGE_LIMIT_S = 600.0
"""Until all servers have merged an adapter: the first one reads the base from a disk."""
_POLL_S = 0.0001
_NCCL_ID = "nccl-id"


class NcclNotOpened(SyncError):
    """NCCL did not open between the GPUs of the ranks; two ranks on one GPU are a cause."""

    code = "nccl-not-opened"


class DirectGroup:
    """Broadcasts from the last rank, into tensors as they lie. ``nccl`` is vLLM's communicator, None on a CPU."""

    def __init__(self, gloo: GlooGroup, device: torch.device, nccl: Any = None) -> None:
        self._gloo, self.device, self._nccl = gloo, device, nccl
        self.store, self.rank, self.source = gloo.store, gloo.rank, gloo.source
        self._streams = [_stream(device, priority=-1), _stream(device)] if nccl is not None else []
        """One for transfers, before all else; one for the work on what has arrived."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, work on a GPU is queued behind all transfers so far, and beside later ones."""
        if not self._streams:
            yield
            return
        transfers, work = self._streams
        work.wait_stream(transfers)
        with torch.cuda.stream(work):
            yield

    def follow(self, *, work: bool = False) -> None:
        """Later transfers wait for what the caller has queued, and with ``work`` for the queued work, too."""
        if self._streams:
            self._streams[0].wait_stream(torch.cuda.current_stream(self.device))
            if work:
                self._streams[0].wait_stream(self._streams[1])

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory to receive into; once nobody holds it, it is used again when all work on it is done."""
        if not self._streams:
            return torch.empty(shape, dtype=dtype, device=self.device)
        transfers, work = self._streams
        with torch.cuda.stream(transfers):
            made = torch.empty(shape, dtype=dtype, device=self.device)
        made.record_stream(work)
        return made

    def broadcast_group(self, tensors: Sequence[Tensor]) -> None:
        """Begin to broadcast contiguous tensors, in order, as one NCCL group. Errors: ``TransferFailed``."""
        raw = [bytes_of(tensor) for tensor in tensors if tensor.numel()]
        if not self._streams:
            broadcast_all(raw, self._gloo.begin)
            return
        if self._nccl is None:
            raise TransferFailed("the group is closed", remedy="Open a communicator.")
        with failing(f"rank {self.rank}"):
            self._nccl.group_start()
            for memory in raw:
                self._nccl.broadcast(memory, src=self.source, stream=self._streams[0])
            self._nccl.group_end()

    def mark(self) -> torch.cuda.Event | None:
        """A point in the work queued by now, to ``wait`` for; None on a CPU, where it is done."""
        if not self._streams:
            return None
        with self.working():
            return cast(torch.cuda.Event, torch.cuda.current_stream(self.device).record_event())

    def wait(
        self, point: torch.cuda.Event | None, check: Callable[[], None] = lambda: None, *, limit_s: float | None = None
    ) -> None:
        """Until all before the point is done; leaves the group when ``check`` raises, and after its time limit.

        Errors: ``TransferFailed``, those of ``check``.
        """
        limit_s = limit_s or self._gloo.address.timeout_s
        deadline = time.monotonic() + limit_s
        finished = point is None
        try:
            while point is not None and not finished:
                finished = bool(point.query())  # type: ignore[no-untyped-call]
                if not finished:
                    check()
                    if time.monotonic() > deadline:
                        raise _failed(f"rank {self.rank}: the weights did not arrive within {limit_s:g} s")
                    time.sleep(_POLL_S)
        finally:
            if not finished:
                self.close()

    def finish(self) -> None:
        """Wait for what the calling thread has queued on a GPU."""
        if self._streams:
            torch.cuda.current_stream(self.device).synchronize()

    def on_device(self) -> AbstractContextManager[object]:
        """Inside, the group's device is the thread's."""
        return torch.cuda.device(self.device) if self._streams else nullcontext()

    def close(self) -> None:
        """Leave; what is in flight is broken off."""
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.destroy()
        self._gloo.close()

    @torch.no_grad()
    def send(self, transfer: WeightTransfer, check: Callable[[], None]) -> tuple[str, ...]:
        """Send every bucket in one group of broadcasts, then the digests, which are returned in hexadecimal.

        An adapter's buckets are one broadcast each, and digests of its merges are made and sent while servers merge.
        ``check`` raises when a server has given up. Errors: ``TransferFailed``, those of ``check``.
        """
        num_sent = len(transfer.plan.specs)
        with self.on_device():
            sums = torch.zeros(num_sent + len(transfer.merges), 2, dtype=torch.int64, device=self.device)
            sent, merged = sums[:num_sent], sums[num_sent:]
            in_flight = self._send_buckets(transfer, sent, check)
            self.follow(work=True)
            self.broadcast_group([sent])
            arrived, limit_s = self.mark(), None
            if transfer.is_adapter:
                add_mixed_of_each(transfer.merged, merged)
                self.wait(arrived, check)
                self.follow()
                self.broadcast_group([merged])
                arrived, limit_s = self.mark(), MERGE_LIMIT_S
            self.wait(arrived, check, limit_s=limit_s)
            in_flight.clear()
        return tuple(digest.hex() for digest in mixed_digests(sums))

    def _send_buckets(self, transfer: WeightTransfer, sums: Tensor, check: Callable[[], None]) -> list[list[Tensor]]:
        """Begin all broadcasts of weights, and add what their digests are made of to ``sums``.

        Returns what is under way by bucket, which may be casts: they stay until it has gone.
        """
        kept: list[list[Tensor]] = []
        points: list[torch.cuda.Event | None] = []
        for bucket in transfer.plan.buckets:
            parts = _parts_of(transfer, bucket, self.device)
            if transfer.is_adapter:
                parts = [torch.cat([part.view(-1) for part in parts])]
            self.follow()
            self.broadcast_group(parts)
            with self.working():
                specs = transfer.plan.specs[bucket.start : bucket.stop]
                self._add_digests(parts, specs, sums[bucket.start : bucket.stop])
            kept.append(parts)
            points.append(self.mark())
            done = len(kept) - _num_in_flight(transfer)
            if done >= 0:
                self.wait(points[done], check)
                kept[done] = []
        return kept

    @staticmethod
    def _add_digests(parts: Sequence[Tensor], specs: Sequence[Spec], sums: Tensor) -> None:
        """Of tensors, or of one run of memory that holds them all."""
        if len(parts) == len(specs):
            add_mixed([bytes_of(part) for part in parts], sums)
        else:
            add_mixed_in(parts[0], [spec.num_bytes for spec in specs], sums)


def open_direct(address: GroupAddress, device: torch.device, *, listener: socket.socket | None = None) -> DirectGroup:
    """Join; returns when all ranks have. Errors: those of ``GlooGroup.open``, ``NcclNotOpened``."""
    gloo = GlooGroup.open(address, listener=listener)
    if device.type != "cuda":
        return DirectGroup(gloo, device)
    forbid_multicast()
    try:
        with torch.cuda.device(device):
            nccl = _open_communicator(gloo.store, device)
    except RuntimeError as error:
        gloo.close()
        raise _not_opened(address, device, str(error)) from error
    if nccl.disabled:
        gloo.close()
        raise _not_opened(address, device, "vLLM finds no NCCL library")
    return DirectGroup(gloo, device, nccl)


def _open_communicator(store: GroupStore, device: torch.device) -> Any:
    """vLLM's communicator on our store. NCCL's id travels as plain bytes: vLLM's own exchange unpickles it."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
    from vllm.distributed.utils import StatelessProcessGroup

    class PlainGroup(StatelessProcessGroup):  # type: ignore[misc]
        def broadcast_obj(self, obj: Any, src: int) -> Any:
            if self.rank == src:
                store.set(_NCCL_ID, bytes(obj))
                return obj
            return ncclUniqueId.from_buffer_copy(store.get(_NCCL_ID))

    address = store.address
    return PyNcclCommunicator(PlainGroup(rank=address.rank, world_size=address.world_size, store=store), device=device)


def device_of(weights: Iterable[tuple[str, Tensor]]) -> torch.device:
    """Where a group of the learner is: on the GPU of its weights, else on the calling thread's, else on the CPU."""
    for _, tensor in weights:
        if tensor.device.type == "cuda":
            return torch.device(tensor.device)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def forbid_multicast() -> None:
    """Set before the first NCCL call of a process or of its children; what the user has set stays."""
    os.environ.setdefault(NVLS, "0")


@contextmanager
def failing(where: str) -> Iterator[None]:
    """Turn what torch, CUDA or NCCL raise into ``TransferFailed``."""
    try:
        yield
    except RollmatchError:  # which may be a RuntimeError, too
        raise
    except RuntimeError as error:
        raise _failed(f"{where}: {first_line(error)}") from error


def _num_in_flight(transfer: WeightTransfer) -> int:
    """Buckets at the same time.

    The next one may be gathered meanwhile, by another communicator: only the sender is in both, so that neither waits
    for the other.
    """
    return 2 if transfer.is_streamed else 3


def _parts_of(transfer: WeightTransfer, bucket: Bucket, device: torch.device) -> list[Tensor]:
    """In the types in which they travel; the learner's own memory where nothing has to change."""
    indices = range(bucket.start, bucket.stop)
    kinds = [transfer.plan.specs[index].kind[0] for index in indices]
    pairs = zip(indices, kinds)
    return [transfer.tensors[index].detach().to(device, dtype).contiguous() for index, dtype in pairs]


def _stream(device: torch.device, *, priority: int = 0) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


def _failed(problem: str) -> TransferFailed:
    remedy = "Look for the rank that died; then open a new communicator and sync again."
    return TransferFailed(problem, key="broadcast", remedy=remedy)


def _not_opened(address: GroupAddress, device: torch.device, why: str) -> NcclNotOpened:
    return NcclNotOpened(
        f"rank {address.rank} of {address.world_size} on {device}: {first_line(why)}",
        key=f"group_port {address.port}",
        remedy="Give the learner and every worker a GPU of its own; NCCL_DEBUG=WARN shows more.",
    )
