"""The rendezvous of a group: a small key-value store that admits only those who know the group's secret.

The learner makes a secret for each group and hands it to the servers over their authenticated routes. Rank 0 binds
exactly the group's address and holds the store; every member, rank 0 too, connects to it. Both ends of a connection
prove that they know the secret (HMAC, by ``multiprocessing.connection``) before anything else is read. Messages are
msgpack; nothing is unpickled. What travels is not encrypted.
"""

import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import cast

import msgspec
from torch._C._distributed_c10d import Store

from rollmatch.startup import start_thread
from rollmatch.weights.group_address import (
    GroupAddress,
    TransferFailed,
    bind,
    check_address,
    not_joined,
)

GO, DROP = "go", "drop"
_MAX_MESSAGE_BYTES = 2**20
_HANDSHAKE_S, _MAX_HANDSHAKES = 5.0, 32
_RETRY_S, _GRACE_S = 0.01, 5.0


class _Request(msgspec.Struct, array_like=True):
    operation: str
    keys: list[str]
    value: bytes = b""
    timeout_s: float = 0.0


class _Channel:
    """Messages with their length in front, over one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._deadline: float | None = None

    def within(self, seconds: float | None) -> None:
        """Limit all that is read and written from now on."""
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def send_bytes(self, raw: bytes) -> None:
        """Errors: ``OSError``."""
        self._sock.settimeout(self._left_s())
        self._sock.sendall(struct.pack("!I", len(raw)) + raw)

    def recv_bytes(self, maxlength: int = _MAX_MESSAGE_BYTES) -> bytes:
        """Errors: ``OSError``, ``EOFError``."""
        (size,) = struct.unpack("!I", self._read(4))
        if size > maxlength:
            raise OSError(f"a message of {size} bytes")
        return self._read(size)

    def prove(self, secret: str, *, first: bool) -> None:
        """Both sides prove the secret; the ``first`` one challenges first. Errors also: ``AuthenticationError``."""
        steps = (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge)
        for step in steps:
            step(cast(Connection, self), secret.encode())

    def close(self) -> None:
        """Wakes whoever reads."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _left_s(self) -> float | None:
        return None if self._deadline is None else max(0.001, self._deadline - time.monotonic())

    def _read(self, size: int) -> bytes:
        raw = bytearray()
        while len(raw) < size:
            self._sock.settimeout(self._left_s())
            part = self._sock.recv(size - len(raw))
            if not part:
                raise EOFError
            raw += part
        return bytes(raw)


class _StoreServer:
    """Holds the values; a thread for each member."""

    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._listener, self._secret = listener, secret
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._channels: set[_Channel] = set()
        self._handshakes = threading.Semaphore(_MAX_HANDSHAKES)
        self._is_closed = False
        start_thread(self._accept, name="rollmatch-store")

    def close(self) -> None:
        """Stop listening; members see their connections end."""
        with self._changed:
            self._is_closed = True
            channels = list(self._channels)
            self._changed.notify_all()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for channel in channels:
            channel.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._handshakes.acquire(blocking=False):
                start_thread(partial(self._serve, _Channel(sock)), name="rollmatch-store-member")
            else:
                sock.close()

    def _serve(self, channel: _Channel) -> None:
        """One connection, to its end; whoever does not prove the secret is hung up on."""
        with suppress(OSError, EOFError, AuthenticationError, msgspec.MsgspecError):
            if self._admits(channel):
                while True:
                    request = msgspec.msgpack.decode(channel.recv_bytes(), type=_Request)
                    channel.send_bytes(msgspec.msgpack.encode(self._answer(request)))
        with self._changed:
            self._channels.discard(channel)
        channel.close()

    def _admits(self, channel: _Channel) -> bool:
        try:
            channel.within(_HANDSHAKE_S)
            channel.prove(self._secret, first=True)
            channel.within(None)
        finally:
            self._handshakes.release()
        with self._changed:
            self._channels.add(channel)
            return not self._is_closed

    def _answer(self, request: _Request) -> bytes | bool | None:
        with self._changed:
            if request.operation == "set":
                self._values[request.keys[0]] = request.value
                self._changed.notify_all()
                return None
            here = self._changed.wait_for(
                lambda: self._is_closed or all(key in self._values for key in request.keys), timeout=request.timeout_s
            )
            if request.operation == "get":
                return self._values.get(request.keys[0])
            return here and not self._is_closed


class GroupStore(Store):
    """One member's connection; also the ``Store`` through which gloo and NCCL find their peers."""

    def __init__(self, address: GroupAddress, *, listener: socket.socket | None = None) -> None:
        """Connect; rank 0 may bring its listener. Errors: ``GroupPortInUse``, ``CommunicatorTimeout``."""
        super().__init__()
        check_address(address)
        self.address, self._timeout_s = address, address.join_timeout_s
        self._lock = threading.Lock()
        self._endings: list[Callable[[], object]] = []
        """What closes sockets, at the latest when nobody holds this object any more."""
        if address.rank == 0:
            server = _StoreServer(listener or bind(address.host, address.port), address.secret)
            self._endings.append(weakref.finalize(self, server.close))
        self._channel = self._connect()
        self._endings.append(weakref.finalize(self, self._channel.close))

    def limit(self, timeout_s: float) -> None:
        """Longest wait for a key from now on."""
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        """Errors: ``TransferFailed``."""
        self._ask(_Request("set", [key], value.encode() if isinstance(value, str) else bytes(value)))

    def get(self, key: str) -> bytes:
        """The value, as soon as there is one. Errors: ``TransferFailed``."""
        value = self._ask(_Request("get", [key], timeout_s=self._timeout_s))
        if not isinstance(value, bytes):
            raise self._failed(f"{key} did not come within {self._timeout_s:g} s")
        return value

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there. Errors: ``TransferFailed``."""
        return self._ask(_Request("has", keys)) is True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there. Errors: ``TransferFailed``."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        if self._ask(_Request("has", keys, timeout_s=limit_s)) is not True:
            raise self._failed(f"some rank did not come within {limit_s:g} s")

    def set_ready(self, sync_id: str) -> None:
        """Announce to the learner that this rank waits for the bytes of a sync."""
        self.set(f"sync/{sync_id}/ready/{self.address.rank}", "1")

    def is_ready(self, sync_id: str, ranks: Iterable[int], *, within_s: float) -> bool:
        """Whether all of these ranks wait for the bytes, or do within so many seconds. Errors: ``TransferFailed``."""
        keys = [f"sync/{sync_id}/ready/{rank}" for rank in ranks]
        return self._ask(_Request("has", keys, timeout_s=within_s)) is True

    def give_verdict(self, sync_id: str, verdict: str) -> None:
        """The learner's decision on a sync: ``GO`` or ``DROP``."""
        self.set(f"sync/{sync_id}/verdict", verdict)

    def wait_verdict(self, sync_id: str) -> str:
        """The learner's decision, as soon as there is one. Errors: ``TransferFailed``."""
        return self.get(f"sync/{sync_id}/verdict").decode()

    def close(self) -> None:
        """Leave; with rank 0 the store ends."""
        for end in reversed(self._endings):
            end()

    def _connect(self) -> _Channel:
        address, deadline, problem = self.address, time.monotonic() + self.address.join_timeout_s, "nobody listens"
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                sock = socket.create_connection((address.host, address.port), timeout=min(left_s, _HANDSHAKE_S))
            except OSError as error:
                problem = str(error.strerror or error)
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                channel = _Channel(sock)
                try:
                    channel.within(min(left_s, _HANDSHAKE_S))
                    channel.prove(address.secret, first=False)
                    return channel
                except (OSError, EOFError, AuthenticationError):  # an older group's store, which is about to close
                    problem = "whoever listens does not know the group's secret"
                    channel.close()
            time.sleep(_RETRY_S)
        self.close()
        raise not_joined(address, problem)

    def _ask(self, request: _Request) -> bytes | bool | None:
        try:
            with self._lock:
                self._channel.within(request.timeout_s + _GRACE_S)
                self._channel.send_bytes(msgspec.msgpack.encode(request))
                return msgspec.msgpack.decode(self._channel.recv_bytes(), type=bytes | bool | None)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            raise self._failed(f"the group's store is gone ({type(error).__name__})") from error

    def _failed(self, problem: str) -> TransferFailed:
        where = f"rank {self.address.rank} of {self.address.world_size}"
        remedy = "Look for the rank that died; then open a new communicator and sync again."
        return TransferFailed(f"{where}: {problem}", key=f"group_port {self.address.port}", remedy=remedy)
