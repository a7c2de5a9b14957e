"""An update by vLLM's routes: started, sent in any number of calls that end when their tensors are here, finished.

Nothing is replaced before the end. There, the update is complete and is committed, or it is dropped.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from rollmatch.dialects.vllm.bodies import InitInfo, Packing, UpdateInfo
from rollmatch.errors import RollmatchError
from rollmatch.server.announced import AnnouncementInvalid, check_complete, check_tensor, specs_of
from rollmatch.server.communicator import STOCK, agreed, check_aliases
from rollmatch.server.memory_names import MemoryNames
from rollmatch.server.payloads import TensorSpec
from rollmatch.server.state import ServerState
from rollmatch.server.update import Attached, Event, Incoming, UpdateRefused
from rollmatch.weights.group_address import GroupAddress
from rollmatch.weights.plan import Spec
from rollmatch.weights.transfer_plan import TransferPlan, to_wire

TRANSPORT = "stateless"
JOIN_TIMEOUT_S, TRANSFER_TIMEOUT_S = 60.0, 120.0
"""Until the learner has joined, and until it has sent the next broadcast: it may gather a gigabyte before."""


class StockUpdate:
    """What the calls of these routes do to a server's weights."""

    def __init__(self, server: ServerState) -> None:
        self.pool, self.communicator, self.model, self.update = (
            server.pool,
            server.communicator,
            server.model,
            server.update,
        )
        self._names = MemoryNames(server.model)
        self._packing = Packing()
        self._turn = asyncio.Lock()
        """Calls that change the update come one after the other."""
        self._digests: dict[str, str] = {}
        """Of what has arrived."""
        self._committing: asyncio.Task[Any] | None = None

    async def open(self, info: InitInfo) -> None:
        """Join the learner's group on all workers. Errors: those of ``Communicator.join``."""
        address = GroupAddress(
            host=info.master_address,
            port=info.master_port,
            rank=info.rank_offset,
            world_size=info.world_size,
            source=0,
            timeout_s=TRANSFER_TIMEOUT_S,
            join_timeout_s=JOIN_TIMEOUT_S,
        )
        await self.communicator.join(STOCK, address, transport=TRANSPORT)
        self._packing = info

    async def close(self) -> None:
        """Leave the group, if there is one; what has arrived is dropped. Errors: ``CommunicatorRefused``."""
        if self.update.attached is not None:
            self.update.check_attached(STOCK)
        await self.communicator.close()

    async def start(self) -> None:
        """Errors: ``CommunicatorRefused``, ``UpdateRefused``."""
        self.update.check_attached(STOCK)
        self.update.check(Event.ANNOUNCED)  # no update is on its way
        self.update.fire(Event.ANNOUNCED_CHUNK)
        self._digests = {}

    async def receive(self, info: UpdateInfo) -> None:
        """Ends when all workers hold these tensors, beside the served ones. A caller that hangs up leaves its group.

        Errors: ``CommunicatorRefused``, ``UpdateRefused``, those of ``announced`` and of the workers; after those of
        the workers, the update is dropped.
        """
        async with self._turn:
            attached = self._check_started()
            tensors, plan = await asyncio.to_thread(self._plan_of, info)
            self._check(tensors)
            try:
                await self.pool.call_all("rollmatch_receive", to_wire(plan))
                digests = agreed(await self.communicator.settle())
                self.update.gather(spec.name for spec in tensors)
            except asyncio.CancelledError:
                await self.communicator.close(only=attached)
                raise
            except RollmatchError:
                if self.update.attached is attached:
                    await self._drop()
                raise
            self._digests = digests

    async def finish(self, weight_version: str | None) -> None:
        """Serve what was sent, even if the caller hangs up meanwhile.

        Errors: ``CommunicatorRefused``, ``UpdateRefused``; ``TensorMismatch`` and ``AnnouncementInvalid``, after which
        the update is dropped; those of ``Communicator.swap``.
        """
        async with self._turn:
            self._check_started()
            try:
                check_complete(self.update.chunk_names, self.model)
                check_aliases(self._digests, self.model)
            except RollmatchError:
                await self._drop()
                raise
            self._committing = asyncio.create_task(self._commit(weight_version))
            await asyncio.shield(self._committing)

    async def _commit(self, weight_version: str | None) -> None:
        await self.communicator.swap(self.update.policy_version + 1)
        if weight_version is not None:
            self.update.name_version(weight_version)

    def _check_started(self) -> Attached:
        attached = self.update.check_attached(STOCK)
        if self.update.incoming is not Incoming.GATHERING:
            remedy = "Call /start_weight_update first."
            raise UpdateRefused("no update was started", key="update", remedy=remedy, code="update-not-started")
        return attached

    def _plan_of(self, info: UpdateInfo) -> tuple[list[TensorSpec], TransferPlan]:
        """The checkpoint's tensors that come, and how the workers receive them.

        Errors: ``AnnouncementInvalid``, ``TensorMismatch``.
        """
        announced = tensors_of(info)
        stored, swapped = self._names.stored(announced)
        tensors, left = [part for parts in stored for part in parts], iter(stored)
        for spec in tensors:
            check_tensor(spec, self.model, is_cast=True)  # TRL's trainers keep float32, and announce it
        counts = broadcasts_of(specs_of(announced), info.packing(self._packing))
        buckets = tuple(sum(len(next(left)) for _ in range(count)) for count in counts)
        return tensors, TransferPlan(tensors=specs_of(tensors), buckets=buckets, swapped=tuple(swapped))

    def _check(self, tensors: Sequence[TensorSpec]) -> None:
        """Each comes once in an update. Errors: ``AnnouncementInvalid``."""
        seen = set(self.update.chunk_names)
        for spec in tensors:
            if spec.name in seen:
                remedy = "Announce each tensor once."
                raise AnnouncementInvalid("announced twice", key=spec.name, remedy=remedy, code="tensor-repeated")
            seen.add(spec.name)

    async def _drop(self) -> None:
        if self.update.incoming is Incoming.GATHERING:
            self.update.fire(Event.DROPPED)
        await self.pool.call_all("rollmatch_drop")


def tensors_of(info: UpdateInfo) -> list[TensorSpec]:
    """As the server compares them. Errors: ``AnnouncementInvalid``."""
    if not len(info.names) == len(info.dtype_names) == len(info.shapes) > 0:
        problem = f"{len(info.names)} names, {len(info.dtype_names)} types, {len(info.shapes)} shapes"
        raise AnnouncementInvalid(
            problem, key="update_info", remedy="Send one of each per tensor, and one tensor at least."
        )
    rows = zip(info.names, info.dtype_names, info.shapes)
    return [TensorSpec(name=name, dtype=dtype, shape=shape) for name, dtype, shape in rows]


def broadcasts_of(specs: Iterable[Spec], packing: Packing) -> list[int]:
    """Number of tensors in each broadcast: a buffer is sent as soon as it holds more than its size.

    >>> shorts = [Spec(name, "int8", (3,)) for name in "abcde"]
    >>> broadcasts_of(shorts, Packing(packed=True, packed_buffer_size_bytes=5)), broadcasts_of(shorts, Packing())
    ([2, 2, 1], [1, 1, 1, 1, 1])
    """
    counts, num_bytes = [0], 0
    for spec in specs:
        if counts[-1] and (not packing.packed or num_bytes > packing.packed_buffer_size_bytes):
            counts.append(0)
            num_bytes = 0
        counts[-1] += 1
        num_bytes += spec.num_bytes
    return counts
