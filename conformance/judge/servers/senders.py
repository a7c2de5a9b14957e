"""The learner's side of each dialect's weight transfer, step by step."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from conformance.judge.calls import RawLearner, Server
from conformance.judge.ports import free_port
from conformance.judge.servers.exchange import RecordedCall
from conformance.judge.servers.peers import halves, world_size
from conformance.judge.servers.sglang import CONTINUE, GROUP, PAUSE
from conformance.judge.servers.talk import Stopped, Talk
from rollmatch.weights.digest import bytes_of
from rollmatch.weights.gloo import open_gloo
from rollmatch.weights.group_address import GroupAddress, bind
from rollmatch.weights.stateless import StatelessGroup, begin_on

TIMEOUT_S = 20.0


def device_of(talk: Talk) -> torch.device:
    """Where the judge holds what it sends: the first GPU that it sees, for NCCL."""
    return torch.device("cuda", 0) if talk.subject.transport == "nccl" else torch.device("cpu")


def flat_metadata(tensors: Mapping[str, Tensor], **fields: Any) -> list[dict[str, Any]]:
    """Where each tensor lies in a bucket, in bytes, as ms-swift writes it; ``fields`` replace values."""
    entries, start = [], 0
    for name, tensor in tensors.items():
        place = {"start_idx": start, "end_idx": start + tensor.nbytes, "numel": tensor.nbytes}
        entries.append({"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)} | place | fields)
        start += tensor.nbytes
    return entries


def parts_of(tensors: Mapping[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """So many tensors each, in their order."""
    names = list(tensors)
    return [{name: tensors[name] for name in names[place : place + size]} for place in range(0, len(names), size)]


class QueuedPeer:
    """ms-swift's and TRL's trainers: the last rank of a group that the server's first worker opens."""

    endings: Sequence[str] = ()

    def __init__(self, talk: Talk) -> None:
        self.talk, self.group, self.host = talk, None, talk.subject.group_host

    def init(self, label: str = "init", **fields: Any) -> RecordedCall:
        """The call alone."""
        self.port = fields.get("port") or free_port()
        self.size = world_size(self.talk) + 1
        request_body = {"host": self.host, "port": self.port, "world_size": self.size}
        request_body["client_device_uuid"] = "judge"
        return self.talk.post(label, "/init_communicator/", request_body | fields)

    def join(self, label: str = "join") -> None:
        address = GroupAddress(
            host=self.host, port=self.port, rank=self.size - 1, world_size=self.size,
            timeout_s=TIMEOUT_S, join_timeout_s=TIMEOUT_S,
        )  # fmt: skip
        _wait(lambda: _is_listening(self.host, self.port), 5.0)  # the reply may come before the worker listens
        self.talk.collective(label, "JOIN", lambda: setattr(self, "group", self._joined(address)))

    def _joined(self, address: GroupAddress) -> StatelessGroup:
        return StatelessGroup(address, device=device_of(self.talk))

    def open(self) -> None:
        self.talk.post("close-before", "/close_communicator/", note=False)
        if self.init().is_refusal:
            raise Stopped(self.talk.exchange.one("init").summary())
        self.join()

    def pass_on(self, tensor: Tensor, label: str = "broadcast", *, note: bool = False) -> None:
        """One broadcast and the barrier."""
        self.talk.collective(label, "SEND", lambda: self.group.broadcast(tensor.contiguous()), note=note)

    def finish(self) -> None:
        for path in self.endings:
            self.talk.post(f"end{path.rstrip('/').replace('/', '-')}", path, timeout_s=60)

    def release(self) -> None:
        """As the next learner does after one that is gone."""
        self.talk.post("close", "/close_communicator/", timeout_s=10)

    def close(self) -> None:
        if self.group is not None and device_of(self.talk).type == "cuda":
            self.group.close()
        self.group = None
        self.talk.post("close", "/close_communicator/", note=False, timeout_s=5)


class SwiftPeer(QueuedPeer):
    """Buckets of raw bytes."""

    endings = ("/process_weights_after_loading/", "/reset_prefix_cache/", "/reset_encoder_cache/")

    def announce(self, tensors: Mapping[str, Tensor], label: str = "update", **fields: Any) -> RecordedCall:
        body = {"metadatas": flat_metadata(tensors, **fields)}
        return self.talk.post(label, "/update_flattened_params/", body)

    def send(self, tensors: Mapping[str, Tensor], label: str = "update", *, per_call: int | None = None) -> None:
        """In two buckets, or in buckets of so many tensors; ``Stopped`` where one is refused."""
        for bucket in parts_of(tensors, per_call) if per_call else filter(None, halves(tensors)):
            if not self.announce(bucket, label).is_ok:
                raise Stopped(self.talk.exchange.one(label).summary())
            self.pass_on(torch.cat([bytes_of(tensor) for tensor in bucket.values()]))

    def pass_on(self, tensor: Tensor, label: str = "broadcast", *, note: bool = False) -> None:
        """As bytes."""
        super().pass_on(bytes_of(tensor), label, note=note)


class TrlPeer(QueuedPeer):
    """One tensor at a time."""

    endings = ("/reset_prefix_cache/",)

    def announce(
        self, tensors: Mapping[str, Tensor], label: str = "update", *, note: bool = True, **fields: Any
    ) -> RecordedCall:
        [(name, tensor)] = tensors.items()
        body = {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)} | fields
        return self.talk.post(label, "/update_named_param/", body, note=note)

    def send(self, tensors: Mapping[str, Tensor], label: str = "update") -> None:
        """``Stopped`` where one is refused; of calls that go well, the first is written down."""
        for place, (name, tensor) in enumerate(tensors.items()):
            call = self.announce({name: tensor}, label, note=place == 0)
            if not call.is_ok:
                raise Stopped(call.summary())
            self.pass_on(tensor)


class VllmPeer:
    """Trainers of a stock server: rank 0, and calls that end when what they ask for is done."""

    beginning, ending = "/start_weight_update", "/finish_weight_update"
    """Routes around an update."""
    keys = "gloo"
    """Prefix of the group's keys in its store."""
    joining_limit_s = 40.0
    """After which the call that opens a group is given up."""

    def __init__(self, talk: Talk) -> None:
        self.talk, self.group, self.host = talk, None, talk.subject.group_host

    def init(self, label: str = "init", **fields: Any) -> RecordedCall:
        """The call alone; it ends when all have joined."""
        self.port = fields.pop("port", None) or free_port()
        self.size = world_size(self.talk) + 1
        body = {"master_address": self.host, "master_port": self.port, "rank_offset": 1, "world_size": self.size}
        request_body = {"init_info": body | fields}
        return self.talk.post(label, "/init_weight_transfer_engine", request_body, timeout_s=self.joining_limit_s)

    def open(self) -> None:
        call = self.talk.beside(self.init)
        _wait(lambda: call.done() or hasattr(self, "size"))
        if call.done():
            raise Stopped(call.result().summary())
        self.join()
        if not call.result().is_ok:
            raise Stopped(call.result().summary())

    def join(self, label: str = "join") -> None:
        address = GroupAddress(
            host=self.host, port=self.port, rank=0, world_size=self.size, timeout_s=TIMEOUT_S, join_timeout_s=TIMEOUT_S
        )
        self.talk.collective(label, "JOIN", lambda: setattr(self, "group", self._joined(address)))

    def _joined(self, address: GroupAddress) -> "PeerGroup | StatelessGroup":
        if (device := device_of(self.talk)).type == "cpu":
            return PeerGroup(address, self.keys)
        return StatelessGroup(address, listener=bind(address.host, address.port), device=device, source=0)

    def pause(self) -> None:
        self.talk.post("pause", "/pause?mode=wait", timeout_s=60)

    def begin(self, label: str = "start", *, pause: bool = True) -> RecordedCall:
        if pause:
            self.pause()
        return self.talk.post(label, self.beginning, timeout_s=60)

    def announce(self, tensors: Mapping[str, Tensor], label: str = "update", **fields: Any) -> "Future[RecordedCall]":
        body = {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        } | fields
        return self.talk.beside(self.talk.post, label, "/update_weights", {"update_info": body}, timeout_s=60)

    def send(
        self, tensors: Mapping[str, Tensor], label: str = "update", *, pause: bool = True, per_call: int | None = None
    ) -> None:
        """In one call, or in calls of so many tensors; ``Stopped`` where one is refused."""
        if not self.begin(pause=pause).is_ok:
            raise Stopped(self.talk.exchange.one("start").summary())
        for part in parts_of(tensors, per_call or len(tensors)):
            self._send_part(part, label)

    def _send_part(self, tensors: Mapping[str, Tensor], label: str) -> None:
        call = self.announce(tensors, label)
        for tensor in tensors.values():
            if call.done():
                break
            self.talk.collective("broadcast", "SEND", lambda t=tensor: self.group.broadcast(t.contiguous()), note=False)
        if not call.result().is_ok:
            raise Stopped(call.result().summary())

    def finish(self) -> None:
        self.talk.post("finish", self.ending, {"weight_version": str(time.monotonic_ns())}, timeout_s=60)
        self.talk.post("resume", "/resume")

    def release(self) -> None:
        """As the next learner does after one that is gone."""
        self.talk.post("resume", "/resume", timeout_s=10)

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None
            self.talk.post("shut", "/shutdown_weight_transfer_engine", note=False, timeout_s=10)
            self.talk.post("resume", "/resume", note=False, timeout_s=5)


class SglangPeer(VllmPeer):
    """Trainers of SGLang: rank 0 of a group that torch opens by its name."""

    beginning, ending = "/begin_weight_update", "/end_weight_update"
    keys = f"{GROUP}/{GROUP}//cpu/"

    def init(self, label: str = "init", **fields: Any) -> RecordedCall:
        self.port = fields.pop("port", None) or free_port()
        self.size = 1 + self.talk.get("world-size", "/server_info", note=False).reply["tp_size"]
        body = {"master_address": self.host, "master_port": self.port, "rank_offset": 1, "world_size": self.size}
        named = {"group_name": GROUP, "backend": "gloo"}
        return self.talk.post(
            label, "/init_weights_update_group", body | named | fields, timeout_s=self.joining_limit_s
        )

    def open(self) -> None:
        """After what a learner that is gone may have left."""
        self._end("close-before")
        super().open()

    def _end(self, label: str) -> None:
        self.talk.post(label, "/destroy_weights_update_group", {"group_name": GROUP}, note=False, timeout_s=10)
        self.talk.post(label, self.ending, note=False, timeout_s=10)

    def pause(self) -> None:
        """What runs is put back, and is read again by the new weights."""
        self.talk.post("pause", PAUSE, {"mode": "retract"}, timeout_s=60)

    def announce(self, tensors: Mapping[str, Tensor], label: str = "update", **fields: Any) -> "Future[RecordedCall]":
        body = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": GROUP,
        } | fields
        return self.talk.beside(self.talk.post, label, "/update_weights_from_distributed", body, timeout_s=60)

    def finish(self) -> None:
        self.talk.post("finish", self.ending, timeout_s=60)
        version = {"new_version": str(time.monotonic_ns()), "abort_all_requests": False}
        self.talk.post("finish-version", "/update_weight_version", version)
        self.release()

    def release(self) -> None:
        self.talk.post("resume", CONTINUE, timeout_s=10)

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None
        self._end("close")
        self.talk.post("resume", CONTINUE, note=False, timeout_s=5)


class PeerGroup:
    """Gloo on a store without a secret, held by rank 0, as the plugged ``gloo_transfer`` and SGLang expect it."""

    def __init__(self, address: GroupAddress, keys: str) -> None:
        listener = bind(address.host, address.port)
        limit = timedelta(seconds=address.join_timeout_s)
        self._store = TCPStore(
            address.host, address.port, address.world_size, True, limit, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        self._group, self._timeout_s = open_gloo(PrefixStore(keys, self._store), address), address.timeout_s

    def broadcast(self, tensor: Tensor) -> None:
        begin_on(self._group, tensor, source=0, timeout_s=self._timeout_s).wait()

    def close(self) -> None:
        del self._group, self._store


class NativePeer:
    """Our own dialect: one call announces all."""

    joining_limit_s = 40.0

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        server = Server(talk.subject.url)
        server.headers = dict(talk.subject.headers)
        self.learner = RawLearner(server, port=free_port(), client="judge", host=talk.subject.group_host)

    def init(self, label: str = "init", **fields: Any) -> RecordedCall:
        self.learner.world_size = world_size(self.talk) + 1
        return self.talk.post(
            label, "/native/communicator/", self.learner.request_body(**fields), timeout_s=self.joining_limit_s
        )

    def open(self) -> None:
        self.talk.post("close-before", "/native/communicator/close/", {"client": "judge", "force": True}, note=False)
        self.learner.world_size = world_size(self.talk) + 1
        self.talk.collective("open", "JOIN", self._open)

    def _open(self) -> None:
        status, body = self.learner.open()
        if status != 200:
            raise RuntimeError(f"{status} {body}")

    def send(self, tensors: Mapping[str, Tensor], label: str = "update") -> RecordedCall:
        """Announce, send and commit; ``Stopped`` where it is refused."""
        version = int(self.learner.server.version) + 1
        call = RecordedCall(
            label=label, method="POST", path="/native/sync/", sent=f"{len(tensors)} tensors, version {version}"
        )
        began = time.monotonic()
        call.status, call.reply = self.learner.sync(tensors, version=version, sync_id=f"judge-{version}")
        if isinstance(call.reply, dict):
            call.reply = {name: value for name, value in call.reply.items() if not name.endswith("digests")}
        call.seconds = round(time.monotonic() - began, 3)
        self.talk.exchange.calls.append(call)
        if not call.is_ok:
            raise Stopped(call.summary())
        return call

    def finish(self) -> None:
        """Nothing is left to be done."""

    def close(self) -> None:
        self.learner.close(force=True)


def _is_listening(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def _wait(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


PEERS: Mapping[str, Callable[[Talk], QueuedPeer | VllmPeer | NativePeer]] = {
    "swift": SwiftPeer,
    "trl": TrlPeer,
    "vllm": VllmPeer,
    "native": NativePeer,
}
