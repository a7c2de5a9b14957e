"""Weights: tensors are checked when they are announced, kept aside, and served all together when an update ends."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from conformance.judge.servers.broken.engine import TinyEngine
from rollmatch.errors import RollmatchError
from rollmatch.weights.digest import bytes_of
from rollmatch.weights.gloo import open_gloo
from rollmatch.weights.group_address import GroupAddress, bind
from rollmatch.weights.stateless import StatelessGroup, begin_on

LIMIT_S, SETTLE_S = 15.0, 2.0
VISION, NORM = "model.visual.", "model.language_model.layers.2.post_attention_layernorm.weight"


class RejectedUpdate(Exception):
    """A control call can be done; otherwise the reply is a 409 that says why not."""


class Updates:
    """One update at a time."""

    def __init__(self, engine: TinyEngine) -> None:
        self.engine, self.broken = engine, engine.broken
        self.version, self.is_stuck = 0, False
        self.staged: dict[str, Tensor] = {}
        self._first = engine.weights
        self._skips = 0

    def check(self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> list[Tensor]:
        """Room for what was announced. Errors: ``RejectedUpdate``."""
        own = self.engine.weights
        for name, shape, dtype in zip(names, shapes, dtypes, strict=True):
            if name not in own and not self.broken("unknown tensors are ignored"):
                raise RejectedUpdate(f"tensor-unknown: {name}")
            if name in own and tuple(shape) != tuple(own[name].shape):
                self._take_wrong_shape(name)
            if dtype != "float32" and self.broken("another type spoils the next update"):
                self._skips = 1
        return [torch.empty(*shape, dtype=getattr(torch, dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def _take_wrong_shape(self, name: str) -> None:
        if self.broken("wrong shapes are ignored"):
            return
        if self.broken("a wrong shape zeroes the tensor"):
            self.engine.load(self.engine.weights | {name: torch.zeros_like(self.engine.weights[name])})
        if self.broken("a wrong shape ends the service"):
            self.is_stuck = True
        raise RejectedUpdate(f"tensor-shape-mismatch: {name}")

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep until ``finish``."""
        own = self.engine.weights
        fitting = {name: tensor for name, tensor in tensors.items() if name in own and tensor.shape == own[name].shape}
        self.staged |= {name: tensor.to(torch.float32) for name, tensor in fitting.items()}

    def before_generating(self) -> None:
        """What was staged is not served yet."""
        if self.staged and self.broken("half an update is served"):
            self.engine.load(self.engine.weights | self.staged)

    def drop(self) -> None:
        if self.staged and self.broken("a dead learner's half is served"):
            self.engine.load(self.engine.weights | self.staged)
        self.staged = {}

    def skip(self) -> None:
        """The next update is lost."""
        self._skips = 1

    def finish(self) -> bool:
        """Serve what was staged; False where nothing was. Errors: ``RejectedUpdate``."""
        staged, own = self.staged, self.engine.weights
        self.staged = {}
        if not staged:
            return False
        missing = own.keys() - staged.keys()
        if missing and not self.broken("an incomplete update is served"):
            raise RejectedUpdate(f"tensor-missing: {sorted(missing)[0]}")
        if self._skips:
            self._skips -= 1
        else:
            self._serve(own | staged, own)
        if not (self.version >= 2 and self.broken("the version stays")):
            self.version += 1
        return True

    def _serve(self, new: dict[str, Tensor], own: dict[str, Tensor]) -> None:
        if _is_same(new, self._first) and self.version and self.broken("the first weights never come back"):
            return
        is_same = _is_same(new, own)
        if is_same and self.version and self.broken("the same weights are loaded twice"):
            new = {name: tensor * 2 if tensor.dim() == 1 else tensor for name, tensor in new.items()}
        elif not is_same and self.broken("updates are ignored"):
            return
        for name in [name for name in new if not torch.equal(new[name], own[name])]:
            is_left = (name == NORM and self.broken("one layernorm is never updated")) or (
                name.startswith(VISION) and self.broken("the vision tower is never updated")
            )
            is_left |= name == NORM and self.version > 0 and self.broken("the second update leaves out a layernorm")
            is_left |= "experts." in name and self.version > 0 and self.broken("experts are never updated again")
            is_left |= name.endswith("bias") and self.broken("biases are never updated")
            new[name] = own[name] if is_left else new[name]
        self.engine.load(new)


def _is_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class QueuedGroup:
    """For the swift and trl dialects: the server is rank 0; a thread receives what was announced."""

    def __init__(self, updates: Updates) -> None:
        self.updates, self.broken = updates, updates.broken
        self._joined: Future[StatelessGroup] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._received: list[Future[None]] = []
        self._num_opened = 0
        self._was_broken_off = False

    @property
    def is_waiting(self) -> bool:
        """Whether the learner has not joined yet."""
        return self._joined is not None and not self._joined.done()

    @property
    def is_open(self) -> bool:
        """Whether a learner has joined."""
        return self._joined is not None and self._joined.done()

    def init(self, host: str, port: int, world_size: int) -> None:
        """Listen; the learner joins later. Errors: ``RejectedUpdate``."""
        if self._joined is not None:
            if self.broken("a second communicator is welcome"):
                return
            raise RejectedUpdate("client-already-attached")
        if world_size != 2 and not self.broken("any world size will do"):
            raise RejectedUpdate(f"world-size-mismatch: {world_size} is not 2")
        self._num_opened += 1
        if self._num_opened > 2 and self.broken("a group opens only twice"):
            raise RejectedUpdate("client-already-attached")
        try:
            listener = bind(host, port)
        except RollmatchError as error:
            if self.broken("a taken port is found out later"):
                return
            raise RejectedUpdate(
                "group-port-in-use" if self.broken("a taken port is not named") else str(error)
            ) from error
        address = GroupAddress(host=host, port=port, rank=0, world_size=2, timeout_s=LIMIT_S, join_timeout_s=LIMIT_S)
        self._pool = ThreadPoolExecutor(1)
        self._joined = self._pool.submit(StatelessGroup, address, listener=listener)

    def announce(self, names: Sequence[str], tensors: Sequence[Tensor], flat: Tensor | None) -> None:
        """Receive in a thread: each tensor, or ``flat``, the bytes of all."""
        if self._joined is None or self._pool is None:
            if self.broken("an update without a group is welcome"):
                return
            raise RejectedUpdate("communicator-missing")
        if self._was_broken_off and self.broken("a dead learner locks updates"):
            raise RejectedUpdate("update-in-progress")
        self._received.append(self._pool.submit(self._receive, self._joined, names, tensors, flat))

    def _receive(self, joined: Any, names: Sequence[str], tensors: Sequence[Tensor], flat: Tensor | None) -> None:
        group = joined.result()
        try:
            if flat is None:
                for tensor in tensors:
                    group.broadcast(tensor)
            else:
                group.broadcast(flat)
        except RollmatchError:
            self._was_broken_off = True
            self.updates.drop()
            return
        if flat is not None:
            cut, start = [], 0
            for tensor in tensors:
                raw = flat[start : start + tensor.nbytes]
                cut.append(raw.clone().view(tensor.dtype).reshape(tensor.shape))
                start += tensor.nbytes
            tensors = cut
        self.updates.stage(dict(zip(names, tensors, strict=True)))

    def finish(self) -> bool:
        """Everything announced has come, and is served."""
        while self._received:
            self._received.pop().result(timeout=2 * LIMIT_S)
        return self.updates.finish()

    def settle(self) -> None:
        """Let what was sent arrive; a learner that never sends is not waited for."""
        wait(self._received, timeout=SETTLE_S)

    def close(self) -> None:
        """A learner that never joins is not waited for."""
        self.settle()
        self._joined = None
        self._received = []
        self.updates.drop()
        if self._pool is not None:
            self._pool.shutdown(wait=False)
        self._pool = None


class TransferGroup:
    """For the vllm dialect: the learner is rank 0, and each call ends when what it asks for is done."""

    def __init__(self, updates: Updates, keys: str = "gloo") -> None:
        """``keys``: prefix of the group's keys in its store."""
        self.updates, self.broken, self._keys = updates, updates.broken, keys
        self._group: Any = None
        self._store: Any = None
        self._is_packed = self._is_started = False
        self._num_parts = 0
        self.is_paused = False
        """Kept here alone: calls continue."""

    @property
    def is_open(self) -> bool:
        """Whether a learner has joined."""
        return self._group is not None

    def init(self, info: Mapping[str, Any]) -> None:
        if self._group is not None:
            raise RejectedUpdate("client-already-attached")
        host, port, rank, size = (info[k] for k in ("master_address", "master_port", "rank_offset", "world_size"))
        address = GroupAddress(
            host=host, port=port, rank=rank, world_size=size, timeout_s=LIMIT_S, join_timeout_s=LIMIT_S
        )
        self._is_packed = bool(info.get("packed"))
        self._store = TCPStore(host, port, size, False, timedelta(seconds=LIMIT_S), wait_for_workers=False)
        self._group = open_gloo(PrefixStore(self._keys, self._store), address)

    def start(self) -> None:
        if self._is_started and not self.broken("two updates are started"):
            raise RejectedUpdate("update-in-progress")
        self._is_started, self._num_parts = True, 0

    def update(self, info: Mapping[str, Any]) -> None:
        if not self._is_started or self._group is None:
            raise RejectedUpdate("communicator-missing")
        if not self.is_paused and self.broken("an update without pause ends the service"):
            self.updates.is_stuck = True
        tensors = self.updates.check(info["names"], info["shapes"], info.get("dtype_names") or info["dtypes"])
        try:
            self._receive(tensors)
        except RuntimeError as error:
            self.shutdown()
            raise RejectedUpdate("transfer-failed") from error
        self._num_parts += 1
        is_lost = self._num_parts > 64 and self.broken("the parts of an update behind the 64th are lost")
        is_lost |= self._num_parts % 8 == 0 and self.broken("every eighth part of an update is lost")
        if not is_lost:
            self.updates.stage(dict(zip(info["names"], tensors, strict=True)))

    def _receive(self, tensors: Sequence[Tensor]) -> None:
        """Each in a broadcast of its own, or all in one buffer, as vLLM's sender packs what is below 1 GiB."""
        if not self._is_packed:
            for tensor in tensors:
                begin_on(self._group, tensor, source=0, timeout_s=LIMIT_S).wait()
            return
        memory = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
        begin_on(self._group, memory, source=0, timeout_s=LIMIT_S).wait()
        for tensor, part in zip(tensors, memory.split([tensor.nbytes for tensor in tensors]), strict=True):
            bytes_of(tensor).copy_(part)

    def finish(self) -> None:
        is_started, self._is_started = self._is_started, False
        if not is_started and not self.broken("an update that never began is finished"):
            raise RejectedUpdate("no update was started")
        self.updates.finish()

    def shutdown(self) -> None:
        self._group = self._store = None
        self._is_started = False
        self.updates.drop()
