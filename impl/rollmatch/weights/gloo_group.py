"""The group that carries weights on machines without GPUs: gloo on a store of its own, outside torch's default group.

One communicator spans the workers of all servers and the learner's rank 0, which is the last rank. Rank 0, the first
server's first worker, binds the address and holds the store.
"""

import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

from rollmatch.errors import SyncError
from rollmatch.weights.flight import Landing

GO, DROP = "go", "drop"
_NUM_THREADS = 4
"""A broadcast under way keeps one busy; torch's own two would let the others wait, and the link rest."""


class GroupPortInUse(SyncError):
    """The worker of rank 0 can listen at the group's address."""

    code = "group-port-in-use"
    status = 409


class CommunicatorTimeout(SyncError):
    """All ranks join the group in time."""

    code = "communicator-timeout"
    status = 409


class TransferFailed(SyncError):
    """A broadcast reaches every rank in time."""

    code = "transfer-failed"
    status = 409


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAddress:
    """Where a group meets, and who this process is in it."""

    host: str
    port: int
    rank: int
    world_size: int
    timeout_s: float = 30.0
    """Longest collective."""
    join_timeout_s: float = 60.0


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at exactly this address. Errors: ``GroupPortInUse``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise GroupPortInUse(
            f"cannot listen at {host}:{port}: {error.strerror or error}",
            key=f"group_port {port}",
            remedy="Choose a free group port on the first rollout server's machine.",
        ) from error
    return listener


class GlooGroup:
    """An open group. Errors of all calls: ``TransferFailed``; after one, the group is of no more use."""

    def __init__(self, address: GroupAddress, store: Store, group: Any) -> None:
        self.address = address
        self.store = store
        self._group: Any = group  # typed as Any: torch ships incomplete stubs
        self._under_way: list[list[Any]] = []
        """Each alone in a list: whoever keeps an error must not keep, by its traceback, the group's sockets open."""

    @classmethod
    def open(cls, address: GroupAddress, *, listener: socket.socket | None = None) -> "GlooGroup":
        """Join; returns when all ranks have. Rank 0 may bring its listener. Errors also: ``CommunicatorTimeout``."""
        if address.rank == 0 and listener is None:
            listener = bind(address.host, address.port)
        limit = timedelta(seconds=address.join_timeout_s)
        try:
            store = open_store(address, listener)
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname=own_address(address.host, address.port))]
            options._timeout = limit
            options._threads = _NUM_THREADS
            place = PrefixStore("weights", store)
            group = ProcessGroupGloo(place, address.rank, address.world_size, options)
        except RuntimeError as error:
            raise not_joined(address, error) from error
        store.set_timeout(timedelta(seconds=address.timeout_s))
        return cls(address, store, group)

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        """Send the tensor from ``source`` to every other rank, in place."""
        self.begin(tensor, source=source)()

    def begin(self, tensor: torch.Tensor, *, source: int) -> Landing:
        """The same, under way when this returns; all ranks begin their broadcasts in one order."""
        if self._group is None:
            raise TransferFailed("the group is closed", remedy="Open a communicator.")
        with self._failing("broadcast"):
            held = [begin_on(self._group, tensor, source=source, timeout_s=self.address.timeout_s)]
        self._under_way.append(held)
        if self._group is None:  # closed meanwhile
            held.clear()

        def land() -> None:
            self._under_way.remove(held)
            if not held:
                raise TransferFailed("the group is closed", remedy="Open a communicator.")
            with self._failing("broadcast"):
                held.pop().wait()

        return land

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """torch's error as ours."""
        try:
            yield
        except RuntimeError as error:
            raise TransferFailed(
                f"rank {self.address.rank} of {self.address.world_size}: {str(error).splitlines()[0]}",
                key=what,
                remedy="Look for the rank that died; then open a new communicator and sync again.",
            ) from error

    def set_ready(self, sync_id: str) -> None:
        """Tell the learner that this rank waits for the bytes of a sync."""
        with self._failing("ready"):
            self.store.set(f"sync/{sync_id}/ready/{self.address.rank}", "1")

    def is_ready(self, sync_id: str, ranks: Iterable[int]) -> bool:
        """Whether all of these ranks wait for the bytes."""
        with self._failing("ready"):
            ready: bool = self.store.check([f"sync/{sync_id}/ready/{rank}" for rank in ranks])
        return ready

    def tell(self, sync_id: str, word: str) -> None:
        """The learner's word on a sync: ``GO`` or ``DROP``."""
        with self._failing(word):
            self.store.set(f"sync/{sync_id}/go", word)

    def wait_word(self, sync_id: str) -> str:
        """The learner's word, as soon as there is one."""
        try:
            word: bytes = self.store.get(f"sync/{sync_id}/go")
        except (RuntimeError, ValueError) as error:
            problem = f"the learner did not begin within {self.address.timeout_s:g} s, or is gone"
            raise TransferFailed(problem, key="go", remedy="Open a new communicator and sync again.") from error
        return word.decode()

    def close(self) -> None:
        """Leave; sockets close with the last reference."""
        for held in self._under_way:
            held.clear()
        self._group = None
        del self.store


def open_store(address: GroupAddress, listener: socket.socket | None) -> TCPStore:
    """The group's store; a plain TCPStore would listen on every interface, so rank 0 hands it a bound socket."""
    keywords = {} if listener is None else {"master_listen_fd": listener.detach()}
    return TCPStore(
        address.host,
        address.port,
        address.world_size,
        is_master=address.rank == 0,
        timeout=timedelta(seconds=address.join_timeout_s),
        wait_for_workers=False,
        **keywords,  # type: ignore[arg-type]
    )


def open_stateless(address: GroupAddress, store: Store) -> Any:
    """gloo on the store of vLLM's ``StatelessProcessGroup``, as both ends of the swift and trl dialects have it."""
    limit = timedelta(seconds=address.join_timeout_s)
    return ProcessGroupGloo(PrefixStore("gloo", store), address.rank, address.world_size, limit)


def broadcast_on(group: Any, tensor: torch.Tensor, *, source: int, timeout_s: float) -> None:
    """One broadcast, in place, within its own time limit. Errors: torch's ``RuntimeError``."""
    begin_on(group, tensor, source=source, timeout_s=timeout_s).wait()


def begin_on(group: Any, tensor: torch.Tensor, *, source: int, timeout_s: float) -> Any:
    """The same, under way: torch's ``Work``."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    options.timeout = timedelta(seconds=timeout_s)
    return group.broadcast([tensor], options)


def not_joined(address: GroupAddress, error: Exception) -> CommunicatorTimeout:
    """What to say when a group does not come about."""
    return CommunicatorTimeout(
        f"rank {address.rank} of {address.world_size} saw no complete group at {address.host}:{address.port} "
        f"(limit {address.join_timeout_s:g} s): {str(error).splitlines()[0]}",
        key=f"group_port {address.port}",
        remedy="Let every server and the learner open the communicator with the same host, port and world size.",
    )


def own_address(host: str, port: int) -> str:
    """The address of this machine's interface that leads to a host.

    >>> own_address("127.0.0.1", 51216)
    '127.0.0.1'
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        own: str = probe.getsockname()[0]
    return own
