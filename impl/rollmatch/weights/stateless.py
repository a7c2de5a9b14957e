"""The group of the swift, trl and vllm dialects: vLLM's ``StatelessProcessGroup``, whose store has no secret.

Rank 0 holds the store. swift and trl: this is the server's first worker, the learner is the last rank and the source,
and a barrier follows every broadcast. vllm, on GPUs: the learner is rank 0 and the source, without barriers. A
barrier's name, a pickled text in the store, is the peers' protocol; here it is read without running a pickle, because
anybody who reaches the port may write to the store. Between GPUs broadcasts go by NCCL, otherwise by gloo.
Sources: vLLM 0.32 ``distributed/utils.py``, ms-swift 4.6 ``rlhf_trainers/vllm_client.py``, TRL 1.10
``extras/vllm_client.py``. An allowed import of vllm.
"""

import ctypes
import pickle
import pickletools
import socket
import threading
import time
import uuid
from collections.abc import Iterable
from datetime import timedelta
from traceback import clear_frames
from typing import Any

import psutil
import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from rollmatch.errors import SyncError, first_line
from rollmatch.weights.gloo import Completion, Work, open_gloo
from rollmatch.weights.group_address import GroupAddress, TransferFailed, not_joined
from rollmatch.weights.nccl import failing, forbid_multicast

_CPU = torch.device("cpu")
_POLL_S, _DECIDED_S = 0.02, 15.0
"""Rank 0 joins as soon as all are in its store; after the second one, gloo's own time limit counts."""
_GLOO = "gloo"
_GLOO_RANK_0 = f"{_GLOO}/0/0"
"""Where gloo's rank 0 writes its address."""
_NCCL_ID = "broadcast_from/0/0"
"""Where vLLM's ``PyNcclCommunicator`` of rank 0 puts it; later, the name of the first barrier."""
_LOOK_S = 2e-4
"""Between two looks at what NCCL does."""


class StatelessGroup:
    """One server's workers and the learner. Errors of all calls: ``TransferFailed``."""

    def __init__(
        self,
        address: GroupAddress,
        *,
        listener: socket.socket | None = None,
        device: torch.device = _CPU,
        source: int | None = None,
        is_left: threading.Event | None = None,
    ) -> None:
        """Join; rank 0 brings the ``listener`` of its store, and the last rank is the source unless another is named.

        ``is_left``: set where nobody waits for the group any more; rank 0 then gives up while it waits for the others.
        Errors: ``CommunicatorTimeout``, ``transports-differ``.
        """
        self.address, self.rank, self.device = address, address.rank, device
        self.source = address.world_size - 1 if source is None else source
        self._has_barriers = self.source > 0
        self._num_barriers = 0
        try:
            self._store = _open_store(address, listener)
            if self.rank == 0 and listener is not None:
                self._await_others(is_left or threading.Event())
            if device.type == "cuda":
                self._group = self._open_nccl()
            else:
                if self.rank:
                    self._refuse_nccl()
                self._group = open_gloo(PrefixStore(_GLOO, self._store), address)
        except SyncError:
            self._forget()
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            clear_frames(error.__traceback__)  # they would keep the store, which listens
            self._forget()
            raise not_joined(address, error) from error
        self._store.set_timeout(timedelta(seconds=address.timeout_s))

    def broadcast(self, memory: Tensor) -> None:
        """From the source into ``memory`` of the others.

        At its end all have the bytes; without barriers, they may be on their way from the source.
        """
        buffer = self._on_device(memory)
        try:
            if self.device.type == "cuda":
                stream = torch.cuda.current_stream(self.device)
                with torch.cuda.device(self.device):
                    self._group.broadcast(buffer, src=self.source, stream=stream)
                if self._has_barriers:
                    self._barrier()
                self._await(stream)
            else:
                begin_on(self._group, buffer, source=self.source, timeout_s=self.address.timeout_s).wait()
                if self._has_barriers:
                    self._barrier()
        except (RuntimeError, ValueError) as error:
            problem = f"rank {self.rank} at {self.address.host}:{self.address.port}: {first_line(error)}"
            remedy = "Look at the server's output; open a new communicator and sync again."
            raise TransferFailed(problem, key="broadcast", remedy=remedy) from error
        if buffer is not memory and self.rank != self.source:
            memory.copy_(buffer)

    def _await(self, stream: torch.cuda.Stream) -> None:
        """NCCL waits for ever for a peer that does not receive; leave then. Errors: ``RuntimeError``."""
        sent, deadline = stream.record_event(), time.monotonic() + self.address.timeout_s
        while not sent.query():
            if time.monotonic() > deadline:
                self._group.destroy()
                raise RuntimeError(f"not received within {self.address.timeout_s:g} s")
            time.sleep(_LOOK_S)

    def _on_device(self, memory: Tensor) -> Tensor:
        """What NCCL or gloo reads from or writes to; ``memory`` itself where it lies on the group's device."""
        if self.rank == self.source or memory.device == self.device:
            return memory.to(self.device)
        return torch.empty_like(memory, device=self.device)

    def send_packed(self, named: Iterable[tuple[str, Tensor]], *, buffer_bytes: int, num_buffers: int) -> None:
        """From the source on a GPU: all tensors through buffers, by vLLM's own producer. Errors: ``TransferFailed``."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        with failing(f"rank {self.rank}"), torch.cuda.device(self.device):
            torch.cuda.synchronize()  # the producer reads on streams of its own
            packed_nccl_broadcast_producer(
                iter(named),
                self._group,
                self.source,
                lambda pair: pair[1].detach().to(self.device),
                buffer_size_bytes=buffer_bytes,
                num_buffers=num_buffers,
            )
            torch.cuda.synchronize()  # up to vLLM 0.27 the producer returns before its last buffer has gone

    def begin(self, memory: Tensor) -> Completion:
        """The same to its end, because the trainer waits for the barrier."""
        self.broadcast(memory)
        return lambda: None

    def close(self) -> None:
        """Leave; a broadcast in flight is aborted. Sockets close with the last reference."""
        if self.device.type == "cuda":
            self._group.destroy()
        del self._group, self._store

    def _forget(self) -> None:
        """The store stops to listen with its last reference."""
        self.__dict__.pop("_store", None)

    def _await_others(self, is_left: threading.Event) -> None:
        """Until all are in the store; gloo and NCCL would hold the port meanwhile. Errors: ``RuntimeError``."""
        deadline = time.monotonic() + self.address.join_timeout_s
        while not self.is_whole():
            if is_left.wait(_POLL_S):
                raise RuntimeError("the group was left")
            if time.monotonic() > deadline:
                raise RuntimeError("not all ranks came")

    def sees_the_learner(self) -> bool:
        """Whether ``is_whole`` may be asked: this rank holds the store, or the learner does."""
        return 0 in (self.rank, self.source)

    def is_whole(self) -> bool:
        """Whether all are connected to this rank's store, itself among them, or this rank is to the learner's.

        A process that died is not.
        """
        connections = psutil.Process().net_connections("tcp")
        open_ones = [each for each in connections if each.status == psutil.CONN_ESTABLISHED]
        if self.rank > 0:
            return any(each.raddr.port == self.address.port for each in open_ones)
        return len([each for each in open_ones if each.laddr.port == self.address.port]) >= self.address.world_size

    def _barrier(self) -> None:
        """As ``StatelessProcessGroup.barrier``; rank 0 names it, waits for all and removes its keys."""
        key = f"broadcast_from/0/{self._num_barriers}"
        self._num_barriers += 1
        if self.rank == 0:
            name = f"barrier_{uuid.uuid4()}"
            self._store.set(key, pickle.dumps(name))  # type: ignore[arg-type]
        else:
            name = read_text(self._store.get(key))
        ranks = range(self.address.world_size)
        self._store.set(f"arrival_{name}_{self.rank}", "1")
        for rank in ranks:
            self._store.get(f"arrival_{name}_{rank}")
        self._store.set(f"departure_{name}_{self.rank}", "1")
        if self.rank == 0:
            for rank in ranks:
                self._store.get(f"departure_{name}_{rank}")
            for rank in ranks:
                self._store.delete_key(f"arrival_{name}_{rank}")
                self._store.delete_key(f"departure_{name}_{rank}")

    def _refuse_nccl(self) -> None:
        """Look how rank 0 joins, before this rank waits for it by gloo. Errors: ``transports-differ``."""
        deadline = time.monotonic() + min(_DECIDED_S, self.address.join_timeout_s)
        while not self._store.check([_GLOO_RANK_0]) and time.monotonic() < deadline:
            if self._store.check([_NCCL_ID]):
                there = f"{self.address.host}:{self.address.port}"
                if self.source > 0:
                    problem = f"the server at {there} joins by NCCL, this learner has no GPU"
                    remedy = "Run the learner on a GPU, or start the server on a machine without GPUs."
                else:
                    problem = f"the learner at {there} joins by NCCL, this server has no GPU"
                    remedy = "Start the server on GPUs."
                raise SyncError(problem, code="transports-differ", key=f"group_port {self.address.port}", remedy=remedy)
            time.sleep(_POLL_S)

    def _open_nccl(self) -> Any:
        """vLLM's communicator; NCCL's id, a pickled object in the store, is read by ``read_nccl_id``."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
        from vllm.distributed.utils import StatelessProcessGroup

        store = self._store

        class ReadingGroup(StatelessProcessGroup):  # type: ignore[misc]
            def broadcast_obj(self, obj: object, src: int) -> object:
                if self.rank == src:
                    return super().broadcast_obj(obj, src)
                raw = read_nccl_id(_nccl_id(store), ctypes.sizeof(ncclUniqueId))
                return ncclUniqueId.from_buffer_copy(raw)

        group = ReadingGroup(rank=self.rank, world_size=self.address.world_size, store=store)
        self._num_barriers = 1  # peers count NCCL's id as the first broadcast of rank 0
        forbid_multicast()
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)):
            made = PyNcclCommunicator(group, device=self.device)  # leaves a stream of vLLM's as the thread's own
        if made.disabled:
            raise RuntimeError("vLLM finds no NCCL library")
        return made


def _nccl_id(store: TCPStore) -> bytes:
    """What rank 0 offers. Errors: ``RuntimeError``."""
    try:
        return bytes(store.get(_NCCL_ID))
    except RuntimeError as error:
        raise RuntimeError("rank 0 offers no NCCL id: it may have no GPU") from error


def _open_store(address: GroupAddress, listener: socket.socket | None) -> TCPStore:
    """A plain TCPStore would listen on every interface, so rank 0 hands it a bound socket.

    A foreign server's store counts who enters and is not ready before all are counted; so the learner is counted.
    """
    keywords: dict[str, int] = {} if listener is None else {"master_listen_fd": listener.detach()}
    return TCPStore(
        address.host,
        address.port,
        address.world_size,
        is_master=address.rank == 0,
        timeout=timedelta(seconds=address.join_timeout_s),
        wait_for_workers=address.rank == address.world_size - 1,
        **keywords,  # type: ignore[arg-type]
    )


_READ = (
    *(
        "PROTO",
        "FRAME",
        "MEMOIZE",
        "BINPUT",
        "BINGET",
        "STOP",
        "GLOBAL",
        "STACK_GLOBAL",
        "EMPTY_DICT",
        "TUPLE2",
        "REDUCE",
    ),
    *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
)
"""Operations of a pickled text and of a pickled NCCL id; the others are not read."""
_LONGEST_PICKLE = 4096


def _constants(packed: bytes) -> list[str | bytes]:
    """Texts and bytes within a pickle, in order; nothing of it is run, and nothing is allocated beyond its own length.

    Errors: ``ValueError``.
    """
    if len(packed) > _LONGEST_PICKLE:
        raise ValueError(f"the store holds {len(packed)} bytes where a barrier's name or NCCL's id is expected")
    found = [(operation.name, value) for operation, value, _ in pickletools.genops(packed)]
    unknown = [name for name, _ in found if name not in _READ]
    if unknown:
        raise ValueError(f"the store holds a pickle with {unknown[0]}, which is not expected there")
    return [value for name, value in found if name not in ("PROTO", "FRAME") and isinstance(value, str | bytes)]


def begin_on(group: ProcessGroupGloo, tensor: Tensor, *, source: int, timeout_s: float) -> Work:
    """One broadcast, in place, within its own time limit. Errors, also of waiting: torch's ``RuntimeError``."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    options.timeout = timedelta(seconds=timeout_s)
    return group.broadcast([tensor], options)  # type: ignore[attr-defined, no-any-return]


def read_text(packed: bytes) -> str:
    """A pickled text; nothing else is read. Errors: ``ValueError``.

    >>> read_text(pickle.dumps("barrier_7"))
    'barrier_7'
    """
    match _constants(packed):
        case [str(text)]:
            return text
    raise ValueError("the store holds another pickle than a text")


def read_nccl_id(packed: bytes, num_bytes: int) -> bytes:
    """The bytes of a pickled ``ncclUniqueId``. Errors: ``ValueError``."""
    found = [value for value in _constants(packed) if isinstance(value, bytes)]
    if len(found) != 1 or len(found[0]) != num_bytes:
        raise ValueError(f"the store holds another pickle than one of {num_bytes} bytes")
    return found[0]
