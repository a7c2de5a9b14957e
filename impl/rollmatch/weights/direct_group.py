"""The group that carries weights straight into the memory they are used in: NCCL between GPUs, gloo without.

It meets as a gloo group, whose store also tells who is ready; NCCL is opened on the same store.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from rollmatch.errors import RollmatchError
from rollmatch.weights.digest import bytes_of
from rollmatch.weights.flight import broadcast_all
from rollmatch.weights.gloo_group import GlooGroup, TransferFailed

NVLS = "NCCL_NVLS_ENABLE"
"""Multicast in the switch of a machine: it fails on some virtual machines, and a broadcast is no faster by it."""
_POLL_S = 0.0001


class DirectGroup:
    """Broadcasts from the last rank, into tensors as they lie. ``nccl`` is vLLM's communicator, None on a CPU."""

    def __init__(self, meeting: GlooGroup, device: torch.device, nccl: Any = None) -> None:
        self.meeting, self.device, self._nccl = meeting, device, nccl
        self.rank, self.source = meeting.address.rank, meeting.address.world_size - 1
        self._streams = [_stream(device, priority=-1), _stream(device)] if nccl is not None else []
        """For what is carried, before all else; and for the work on what has come."""

    def set_ready(self, sync_id: str) -> None:
        """Tell the learner that this rank waits for the bytes of a sync."""
        self.meeting.set_ready(sync_id)

    def is_ready(self, sync_id: str, ranks: Iterable[int]) -> bool:
        """Whether all of these ranks wait for the bytes."""
        return self.meeting.is_ready(sync_id, ranks)

    def tell(self, sync_id: str, word: str) -> None:
        """The learner's word on a sync: ``GO`` or ``DROP``."""
        self.meeting.tell(sync_id, word)

    def wait_word(self, sync_id: str) -> str:
        """The learner's word. Errors: ``TransferFailed``."""
        return self.meeting.wait_word(sync_id)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, work on a GPU is queued behind all that was carried up to now, and beside what is carried next."""
        if not self._streams:
            yield
            return
        carrying, work = self._streams
        work.wait_stream(carrying)
        with torch.cuda.stream(work):
            yield

    def follow(self, *, work: bool = False) -> None:
        """What is carried next waits for what its caller has queued, and for all that is at ``work`` if asked to."""
        if self._streams:
            self._streams[0].wait_stream(torch.cuda.current_stream(self.device))
            if work:
                self._streams[0].wait_stream(self._streams[1])

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory to be carried into; once nobody holds it, it is used again when all work on it is done."""
        if not self._streams:
            return torch.empty(shape, dtype=dtype, device=self.device)
        carrying, work = self._streams
        with torch.cuda.stream(carrying):
            made = torch.empty(shape, dtype=dtype, device=self.device)
        made.record_stream(work)
        return made

    def carry(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to broadcast contiguous tensors, in order, as one group of calls. Errors: ``TransferFailed``."""
        raw = [bytes_of(tensor) for tensor in tensors if tensor.numel()]
        if not self._streams:
            broadcast_all(raw, partial(self.meeting.begin, source=self.source))
            return
        if self._nccl is None:
            raise TransferFailed("the group is closed", remedy="Open a communicator.")
        with failing(f"rank {self.rank}"):
            self._nccl.group_start()
            for memory in raw:
                self._nccl.broadcast(memory, src=self.source, stream=self._streams[0])
            self._nccl.group_end()

    def mark(self) -> Any:
        """A point in the work queued by now, to ``wait`` for; None on a CPU, where it is done."""
        if not self._streams:
            return None
        with self.working():
            return torch.cuda.current_stream(self.device).record_event()

    def wait(self, point: Any, check: Callable[[], None] = lambda: None) -> None:
        """Until all before the point is done; leaves the group when ``check`` raises, and after its time limit.

        Errors: ``TransferFailed``, those of ``check``.
        """
        deadline = time.monotonic() + self.meeting.address.timeout_s
        finished = point is None
        try:
            while not finished:
                finished = point.query()
                if not finished:
                    check()
                    if time.monotonic() > deadline:
                        raise self._late()
                    time.sleep(_POLL_S)
        finally:
            if not finished:
                self.close()

    def finish(self) -> None:
        """Wait for what the calling thread has queued on a GPU."""
        if self._streams:
            torch.cuda.current_stream(self.device).synchronize()

    def on_device(self) -> Any:
        """Inside, the group's device is the thread's."""
        return torch.cuda.device(self.device) if self._streams else nullcontext()

    def close(self) -> None:
        """Leave; what is under way is broken off."""
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.destroy()
        if hasattr(self.meeting, "store"):
            self.meeting.close()

    def _late(self) -> TransferFailed:
        limit_s = self.meeting.address.timeout_s
        return TransferFailed(
            f"rank {self.rank}: the weights did not come through within {limit_s:g} s",
            key="broadcast",
            remedy="Look for the rank that died; then open a new communicator and sync again.",
        )


@contextmanager
def failing(where: str) -> Iterator[None]:
    """What torch, CUDA or NCCL raise, as an error of ours."""
    try:
        yield
    except RollmatchError:  # which may be a RuntimeError, too
        raise
    except RuntimeError as error:
        problem = f"{where}: {str(error).splitlines()[0]}"
        remedy = "Look for the rank that died; then open a new communicator and sync again."
        raise TransferFailed(problem, key="broadcast", remedy=remedy) from error


def forbid_multicast() -> None:
    """Before the first NCCL call of a process or of its children; what the user has set stays."""
    os.environ.setdefault(NVLS, "0")


def _stream(device: torch.device, *, priority: int = 0) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
