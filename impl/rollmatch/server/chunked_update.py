"""Updates of the swift and trl dialects: announced in chunks, none of which is marked as the last.

Chunks are staged; the update commits when every tensor of the model is there. The calls that end a sync in these
dialects wait for that commit, and return what went wrong.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

from rollmatch.errors import RollmatchError
from rollmatch.server.announced import (
    AnnouncementInvalid,
    check_adapter,
    check_complete,
    check_tensor,
    merge_plan_of,
    specs_of,
)
from rollmatch.server.communicator import ANONYMOUS, Communicator, agreed, check_aliases
from rollmatch.server.engine_pool import EnginePool
from rollmatch.server.identity import Model
from rollmatch.server.memory_names import MemoryNames
from rollmatch.server.payloads import AdapterPlan, TensorSpec
from rollmatch.server.update import Event, Incoming
from rollmatch.weights.group_address import GroupAddress, GroupAddressInvalid
from rollmatch.weights.transfer_plan import TransferPlan, to_wire

TRANSPORT = "stateless"


class ChunkedUpdate:
    """What these dialects' control calls do."""

    def __init__(self, pool: EnginePool, communicator: Communicator, model: Model) -> None:
        self.pool, self.update = pool, pool.update
        self.communicator = communicator
        self.model = model
        self._num_announced = 0
        self._announcing = asyncio.Lock()
        """Held while a chunk is announced to the workers: what commits waits for it."""
        self._following: asyncio.Task[None] | None = None
        self._failure: RollmatchError | None = None
        self._names = MemoryNames(model)
        self._committed: dict[str, str] = {}
        """Digests of tensors that others are tied to, as they were last committed."""
        self._arrived: dict[str, str] = {}
        """Digests of what the workers hold."""

    @property
    def is_following(self) -> bool:
        """Whether something that was announced is still on its way, or being committed."""
        return self._following is not None and not self._following.done()

    async def open(self, address: GroupAddress) -> None:
        """The port is bound when this returns; the learner, the last rank, joins afterwards.

        Errors: those of ``Communicator.open``.
        """
        if address.world_size != self.communicator.num_workers + 1:
            problem = f"is {address.world_size}, must be {self.communicator.num_workers + 1}"
            remedy = "Send the server's world size plus one."
            raise GroupAddressInvalid(problem, key="world_size", remedy=remedy, code="world-size-mismatch")
        self._failure = None
        await self.communicator.open(ANONYMOUS, address, transport=TRANSPORT)
        self._follow()

    async def announce(self, tensors: Sequence[TensorSpec]) -> None:
        """One broadcast with the raw bytes of these tensors comes next.

        Errors: ``CommunicatorRefused``, those of ``announced`` and of what went before.
        """
        self.update.check_attached(ANONYMOUS)
        stored, swapped = await asyncio.to_thread(self._names.stored, tensors)
        tensors = [part for parts in stored for part in parts]
        await self._check_turn()
        for spec in tensors:
            check_tensor(spec, self.model, is_cast=True)  # TRL's trainers keep float32, and announce it
        async with self._announcing:
            await self._receive(tensors, swapped=swapped)
            self.update.gather(spec.name for spec in tensors)
            self._follow()

    async def announce_adapter(self, tensors: Sequence[TensorSpec], adapter: AdapterPlan) -> None:
        """The same for an adapter, in one broadcast: merged into the model's own weights, then committed.

        Errors: as ``announce``; ``AnnouncementInvalid``.
        """
        await self._check_turn()
        if self.update.chunk_names:
            problem, remedy = "other weights are on their way", "End their sync before an adapter is sent."
            raise AnnouncementInvalid(problem, key="metadatas", remedy=remedy, code="adapter-invalid")
        check_adapter(adapter, tensors, self.model)
        async with self._announcing:
            await self._receive(tensors)
            self.update.gather((), merge_plan_of(adapter, self.model))
            self._follow()

    async def settle(self) -> None:
        """End of a sync. Errors: ``TensorMismatch`` (what has arrived is dropped), or what went wrong."""
        if self._following is not None:
            await asyncio.shield(self._following)
        self._raise_failure()
        is_ours = self.update.attached is not None and self.update.attached.client == ANONYMOUS
        if is_ours and self.update.incoming is Incoming.GATHERING:
            names, arrived = self.update.chunk_names, self._arrived
            self.update.fire(Event.DROPPED)
            await self.pool.call_all("rollmatch_drop")
            if names and self._committed and names <= self.model.aliases.keys():
                check_aliases(self._committed | arrived, self.model)  # tied tensors that came behind all others
            elif names:
                check_complete(names, self.model)

    async def before_generating(self) -> None:
        """Let a complete update commit first, as these dialects' queues would have it."""
        if self._following is not None and self._is_complete():
            await asyncio.shield(self._following)

    async def close(self) -> bool:
        """Drop, and leave the group; whether there was one."""
        self._failure = None
        return (await self.communicator.close())["closed"]

    async def _check_turn(self) -> None:
        """Raise unless more may be announced; a commit under way is waited for. Errors: as ``announce``."""
        if self._following is not None and self.update.incoming is Incoming.COMMITTING:
            await asyncio.shield(self._following)
        self._raise_failure()
        self.update.check_attached(ANONYMOUS)
        self.update.check(Event.ANNOUNCED_CHUNK)

    async def _receive(self, tensors: Sequence[TensorSpec], *, swapped: Iterable[str] = ()) -> None:
        self.update.fire(Event.ANNOUNCED_CHUNK)
        plan = TransferPlan(tensors=specs_of(tensors), buckets=(len(tensors),), swapped=tuple(swapped))
        await self.pool.call_all("rollmatch_receive", to_wire(plan))
        self._num_announced += 1

    def _is_complete(self) -> bool:
        return self.update.chunk_merge is not None or self.update.chunk_names >= set(self.model.tensors)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _follow(self) -> None:
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Watch what was announced arrive; commit when it is complete."""
        try:
            is_settled = False
            while not is_settled:
                num_seen = self._num_announced
                self._arrived = agreed(await self.communicator.settle())
                async with self._announcing:  # a tied head may be announced behind a whole model
                    is_settled = num_seen == self._num_announced
            if self._is_complete():
                await self._commit(self._arrived)
        except RollmatchError as error:
            self._failure, self._committed = error, {}
            if self.update.incoming is Incoming.GATHERING:
                self.update.fire(Event.FAILED)
            with contextlib.suppress(RollmatchError):  # workers that are dead hold nothing; the first error counts
                await self.pool.call_all("rollmatch_drop")

    async def _commit(self, digests: dict[str, str]) -> None:
        if self.update.chunk_merge is None:
            check_aliases(digests, self.model)
        else:
            replies = await self.pool.call_all("rollmatch_merge", to_wire(self.update.chunk_merge))
            agreed([reply["digests"] for reply in replies])
        await self.communicator.swap(self.update.policy_version + 1)
        self._committed = {target: digests[target] for target in self.model.aliases.values() if target in digests}
