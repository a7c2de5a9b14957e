"""Updates of the swift and trl dialects: announced in chunks, none of which is marked as the last.

Chunks are staged; the update commits when every tensor of the model is there. The calls that end a sync in these
dialects wait for that commit, and return what went wrong.
"""

import asyncio
from collections.abc import Sequence

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
from rollmatch.server.payloads import AdapterPlan, TensorSpec
from rollmatch.weights.group_address import GroupAddress, GroupAddressInvalid
from rollmatch.weights.transfer_plan import MergePlan, TransferPlan, to_wire

TRANSPORT = "stateless"


class ChunkedUpdate:
    """What these dialects' control calls do."""

    def __init__(self, pool: EnginePool, communicator: Communicator, model: Model) -> None:
        self.pool = pool
        self.communicator = communicator
        self.model = model
        self._names: set[str] = set()
        self._num_announced = 0
        self._following: asyncio.Task[None] | None = None
        self._failure: RollmatchError | None = None
        self._adapter: MergePlan | None = None
        """How what arrives next is merged; None: it is no adapter."""

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
        self._raise_failure()
        self.communicator.check_attached(ANONYMOUS)
        for spec in tensors:
            check_tensor(spec, self.model, is_cast=True)  # TRL's trainers keep float32, and announce it
        plan = TransferPlan(tensors=specs_of(tensors), buckets=(len(tensors),))
        await self.pool.call_all("rollmatch_receive", to_wire(plan))
        self._names |= {spec.name for spec in tensors}
        self._num_announced += 1
        self._follow()

    async def announce_adapter(self, tensors: Sequence[TensorSpec], adapter: AdapterPlan) -> None:
        """The same for an adapter, in one broadcast: merged into the model's own weights, then committed.

        Errors: as ``announce``; ``AnnouncementInvalid``.
        """
        self._raise_failure()
        self.communicator.check_attached(ANONYMOUS)
        if self._names:
            problem, remedy = "other weights are on their way", "End their sync before an adapter is sent."
            raise AnnouncementInvalid(problem, key="metadatas", remedy=remedy, code="adapter-invalid")
        check_adapter(adapter, tensors, self.model)
        plan = TransferPlan(tensors=specs_of(tensors), buckets=(len(tensors),))
        await self.pool.call_all("rollmatch_receive", to_wire(plan))
        self._adapter = merge_plan_of(adapter, self.model)
        self._num_announced += 1
        self._follow()

    async def settle(self) -> None:
        """End of a sync. Errors: ``TensorMismatch`` (what has arrived is dropped), or what went wrong."""
        if self._following is not None:
            await asyncio.shield(self._following)
        self._raise_failure()
        if self._names:
            names, self._names = self._names, set()
            await self.pool.call_all("rollmatch_drop")
            check_complete(names, self.model)

    async def before_generating(self) -> None:
        """Let a complete update commit first, as these dialects' queues would have it."""
        if self._following is not None and self._is_complete():
            await asyncio.shield(self._following)

    async def close(self) -> bool:
        """Drop, and leave the group."""
        self._names, self._failure, self._adapter = set(), None, None
        return await self.communicator.close()

    def _is_complete(self) -> bool:
        return self._adapter is not None or self._names >= set(self.model.tensors)

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
            num_seen = -1
            while num_seen != self._num_announced:
                num_seen = self._num_announced
                digests = agreed(await self.communicator.settle())
            if self._is_complete():
                await self._commit(digests)
        except RollmatchError as error:
            self._failure, self._names, self._adapter = error, set(), None

    async def _commit(self, digests: dict[str, str]) -> None:
        if self._adapter is None:
            check_aliases(digests, self.model)
        else:
            replies = await self.pool.call_all("rollmatch_merge", to_wire(self._adapter))
            agreed([reply["digests"] for reply in replies])
        await self.communicator.swap(self.pool.policy_version + 1)
        self._names, self._adapter = set(), None
