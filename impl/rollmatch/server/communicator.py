"""The group that transfers weights, as the server sees it: one learner at a time, and one version at a time."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rollmatch.errors import RollmatchError
from rollmatch.server.announced import AnnouncementInvalid
from rollmatch.server.engine_pool import EnginePool
from rollmatch.server.failures import WorkerDead, WorkerFailure
from rollmatch.server.identity import Model
from rollmatch.server.update import Attached, Event, UpdateRefused
from rollmatch.weights.digest import DigestMismatch
from rollmatch.weights.group_address import GroupAddress, GroupAddressInvalid
from rollmatch.weights.transfer_plan import to_wire

_SHORTEST_POLL_S, _LONGEST_POLL_S, _SHARE_OF_POLLS = 0.001, 0.05, 0.02
_NEWS_S = 0.05
"""After this time a hang-up is known, even if it came in one turn of the loop with the next request."""
ANONYMOUS = ""
"""Client name of swift and trl trainers, which give none."""
STOCK = "a trainer of stock vLLM servers"
"""Client name of those, which give none either."""


class Communicator:
    """Opens, watches and closes the group on all workers, and commits what has arrived."""

    def __init__(self, pool: EnginePool, model: Model, *, num_workers: int, drain_s: float) -> None:
        self.pool, self.update = pool, pool.update
        self.model = model
        self.num_workers = num_workers
        self.drain_s = drain_s
        self._change = asyncio.Lock()
        """Workers hear of a group's end before they hear of the next one."""

    @property
    def num_members(self) -> int:
        """Of the open group, the learner counted; 0 where none is open."""
        return self.update.attached.world_size if self.update.attached else 0

    async def open(self, client: str, address: GroupAddress, *, transport: str) -> list[int]:
        """Bind the port and begin to join; ``address.rank`` is that of the first worker. Returns all ranks.

        Errors: ``GroupPortInUse``, ``GroupAddressInvalid``, ``CommunicatorRefused``.
        """
        if self.update.attached is not None:
            await asyncio.sleep(_NEWS_S)
        await self._leave_the_dead(client)
        self.update.check_free(client)
        if address.rank + self.num_workers > address.world_size - (address.source is None):
            problem = (
                f"{self.num_workers} workers from rank {address.rank} and a learner are more than {address.world_size}"
            )
            remedy = "Count all workers of all servers, and one."
            raise GroupAddressInvalid(problem, key="world_size", remedy=remedy, code="world-size-mismatch")
        attached = Attached(client=client, transport=transport, world_size=address.world_size)
        self.update.open(attached)
        try:
            async with self._change:
                return await self._open_on_workers(address, transport)
        except (RollmatchError, asyncio.CancelledError):
            await self.close(only=attached)
            raise

    async def _leave_the_dead(self, client: str) -> None:
        """Close the group of a trainer without a name that died: there is none by which it could come back."""
        attached, nameless = self.update.attached, (ANONYMOUS, STOCK)
        if client in nameless and attached is not None and attached.client in nameless:
            replies = await self.pool.call_all("rollmatch_members")
            if any(reply.get("lost") for reply in replies):
                await self.close(only=attached)

    async def join(self, client: str, address: GroupAddress, *, transport: str) -> list[int]:
        """Open, and wait until all have joined; a caller that hangs up meanwhile leaves. Errors: of both."""
        ranks, attached = await self.open(client, address, transport=transport), self.update.attached
        try:
            await self.settle()
        except asyncio.CancelledError:
            await self.close(only=attached)
            raise
        return ranks

    async def settle(self, *, wait_s: float = 0.0) -> list[dict[str, str]]:
        """Wait until no worker joins or receives; return the digests that each worker has.

        ``wait_s``: how long workers themselves wait before they reply; they do nothing else meanwhile.
        Errors: those of the workers; where the group itself failed, it is closed.
        """
        began = time.monotonic()
        try:
            while True:
                replies = await self.pool.call_all("rollmatch_poll", wait_s)
                if all(reply["state"] == "idle" for reply in replies):
                    return [reply["digests"] for reply in replies]
                share = min(reply["share"] for reply in replies if reply["state"] != "idle")
                await asyncio.sleep(_pause_s(time.monotonic() - began, share))
        except WorkerFailure as error:
            if error.code in ("transfer-failed", "communicator-timeout"):
                await self.close()
            raise

    async def swap(self, version: int, *, keep: bool = False) -> int:
        """Load what the workers hold, while nothing is generated. Returns the number of restarted requests.

        ``keep``: as of ``EnginePool.drain``.
        Errors: ``UpdateRefused``, ``WorkerDead``, those of the workers, after which full weights are needed.
        """
        self.update.fire(Event.COMMIT)
        outcome = Event.KEPT
        async with self.pool.resuming(keep=keep):
            try:
                num_restarted = await self.pool.drain(within_s=self.drain_s, keep=keep)
                try:
                    await self.pool.call_all("rollmatch_load", sorted(self.model.aliases))
                    await self.forget_old(keep=keep)
                except WorkerDead:
                    raise
                except RollmatchError:
                    outcome = Event.SPOILT
                    raise
            except BaseException:
                self.update.fire(outcome)
                raise
            self.update.serve(version)
        return num_restarted

    async def forget_old(self, *, keep: bool = False) -> None:
        """Empty caches of the old weights. ``keep``: as ``EnginePool.reset_caches``. Errors: ``UpdateRefused``."""
        if not await self.pool.reset_caches(keep=keep):
            problem = "the engine would not give up caches of the old weights"
            raise UpdateRefused(problem, key="caches", remedy="Run a full sync.", code="weights-broken")

    async def close(self, *, only: Attached | None = None) -> dict[str, bool]:
        """Leave the group on all workers. ``only``: leave no group that came after it.

        Returns ``closed``, whether there was one, and ``leaving``, whether a worker is still in one that was left.
        """
        if only is not None and self.update.attached is not only:
            return {"closed": False, "leaving": False}
        was_open = self.update.attached is not None
        self.update.fire(Event.CLOSED)
        async with self._change:
            replies = [] if self.pool.is_dead else await self.pool.call_all("rollmatch_close")
        return {"closed": was_open, "leaving": any(reply.get("leaving") for reply in replies)}

    async def _open_on_workers(self, address: GroupAddress, transport: str) -> list[int]:
        ranks, per_replica = [], self.num_workers // len(self.pool.replicas)
        for index in range(len(self.pool.replicas)):
            first = to_wire(replace(address, rank=address.rank + index * per_replica))
            ranks += [reply["rank"] for reply in await self.pool.call_one(index, "rollmatch_open", first, transport)]
        return ranks


def _pause_s(waited_s: float, share: float) -> float:
    """Until the next look at workers that have received this share by now: rarely, but often towards the end.

    >>> [round(_pause_s(2.0, share), 4) for share in (0.0, 0.5, 0.99, 0.9999)], _pause_s(0.01, 0.0)
    ([0.04, 0.04, 0.0101, 0.001], 0.001)
    """
    left_s = waited_s * (1 - share) / share if share else waited_s
    return min(max(_SHORTEST_POLL_S, min(waited_s * _SHARE_OF_POLLS, left_s / 2)), _LONGEST_POLL_S)


def agreed(digests: Sequence[dict[str, str]]) -> dict[str, str]:
    """The digests, equal on all workers. Errors: ``DigestMismatch``."""
    first = digests[0]
    for other in digests[1:]:
        for name, digest in first.items():
            if other.get(name) != digest:
                problem = f"workers hold {digest} and {other.get(name)}"
                raise DigestMismatch(problem, key=name, remedy="Sync again.")
    return first


def check_aliases(digests: Mapping[str, str], model: Model) -> None:
    """A tied tensor that is sent, too, equals the one it is tied to. Errors: ``AnnouncementInvalid``."""
    for alias, target in model.aliases.items():
        if alias in digests and digests[alias] != digests.get(target):
            problem, remedy = f"is tied to {target} here, but arrived with other bytes", "Untie them in config.json."
            raise AnnouncementInvalid(problem, key=alias, remedy=remedy, code="digest-mismatch")
