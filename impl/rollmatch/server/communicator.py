"""The group that transfers weights, as the server sees it: one learner at a time, and one version at a time."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rollmatch.errors import RollmatchError, SyncError
from rollmatch.server.announced import AnnouncementInvalid
from rollmatch.server.engine_pool import BROKEN, SERVING, EnginePool
from rollmatch.server.failures import WorkerDead, WorkerFailure
from rollmatch.server.identity import Model
from rollmatch.weights.digest import DigestMismatch
from rollmatch.weights.group_address import GroupAddress, GroupAddressInvalid
from rollmatch.weights.transfer_plan import to_wire

_SHORTEST_POLL_S, _LONGEST_POLL_S, _SHARE_OF_POLLS = 0.001, 0.05, 0.02
_NEWS_S = 0.05
"""After this time a hang-up is known, even if it came in one turn of the loop with the next request."""
ANONYMOUS = ""
"""Client name of swift and trl trainers, which give none."""


class CommunicatorRefused(SyncError):
    """One learner at a time has a communicator, opened once and before weights are announced.

    ``code``: ``communicator-missing``, ``communicator-already-open`` or ``client-already-attached``.
    """

    code = "communicator-missing"


class UpdateRefused(SyncError):
    """One update at a time, each with a newer version; what is committed was staged.

    ``code``: ``update-in-progress``, ``version-not-newer``, ``nothing-staged``, ``announcement-unknown``,
    ``sync-dropped`` or ``weights-broken``.
    """

    code = "update-refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """Who is attached, and how."""

    client: str
    transport: str
    world_size: int


class Communicator:
    """Opens, watches and closes the group on all workers, and commits what has arrived."""

    def __init__(self, pool: EnginePool, model: Model, *, num_workers: int, drain_s: float) -> None:
        self.pool = pool
        self.model = model
        self.num_workers = num_workers
        self.drain_s = drain_s
        self.attached: Attached | None = None
        self._change = asyncio.Lock()
        """Workers hear of a group's end before they hear of the next one."""

    @property
    def num_members(self) -> int:
        """Of the open group, the learner counted; 0 where none is open."""
        return self.attached.world_size if self.attached else 0

    def check_free(self, client: str) -> None:
        """Errors: ``CommunicatorRefused``."""
        if self.attached is None:
            return
        if self.attached.client == client:
            problem, code = "this learner has a communicator", "communicator-already-open"
            raise CommunicatorRefused(problem, key="client", remedy="Close it first.", code=code)
        problem = f"{self.attached.client or 'a swift or trl trainer'} is attached"
        remedy = "Wait until it leaves; if it is gone for good, close its communicator with force."
        raise CommunicatorRefused(problem, key="client", remedy=remedy, code="client-already-attached")

    def check_attached(self, client: str) -> Attached:
        """Errors: ``CommunicatorRefused``."""
        if self.attached is None:
            raise CommunicatorRefused("no communicator is open", key="client", remedy="Open one first.")
        if self.attached.client != client:
            self.check_free(client)
        return self.attached

    async def open(self, client: str, address: GroupAddress, *, transport: str) -> list[int]:
        """Bind the port and begin to join; ``address.rank`` is that of the first worker. Returns all ranks.

        Errors: ``GroupPortInUse``, ``GroupAddressInvalid``, and those of ``check_free``.
        """
        if self.attached is not None:
            await asyncio.sleep(_NEWS_S)
        self.check_free(client)
        if address.rank + self.num_workers > address.world_size - 1:
            problem = (
                f"{self.num_workers} workers from rank {address.rank} and a learner are more than {address.world_size}"
            )
            remedy = "Count all workers of all servers, and one."
            raise GroupAddressInvalid(problem, key="world_size", remedy=remedy, code="world-size-mismatch")
        attached = Attached(client=client, transport=transport, world_size=address.world_size)
        self.attached = attached
        try:
            async with self._change:
                return await self._open_on_workers(address, transport)
        except (RollmatchError, asyncio.CancelledError):
            await self.close(only=attached)
            raise

    async def join(self, client: str, address: GroupAddress, *, transport: str) -> list[int]:
        """Open, and wait until all have joined; a caller that hangs up meanwhile leaves. Errors: of both."""
        ranks, attached = await self.open(client, address, transport=transport), self.attached
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

    async def swap(self, version: int) -> int:
        """Load what the workers hold, while nothing is generated. Returns the number of restarted requests."""
        async with self.pool.quiet(drain_s=self.drain_s) as num_restarted:
            try:
                await self.pool.call_all("rollmatch_load", sorted(self.model.aliases))
                await self.forget_old()
            except WorkerDead:
                raise
            except RollmatchError:
                self.pool.state = BROKEN
                raise
            self.pool.policy_version, self.pool.state = version, SERVING
            return num_restarted

    async def forget_old(self) -> None:
        """Empty caches of the old weights. Errors: ``UpdateRefused``."""
        if not await self.pool.reset_caches():
            problem = "the engine would not give up caches of the old weights"
            raise UpdateRefused(problem, key="caches", remedy="Run a full sync.", code="weights-broken")

    async def close(self, *, only: Attached | None = None) -> bool:
        """Leave the group on all workers; whether there was one. ``only``: leave no group that came after it."""
        if only is not None and self.attached is not only:
            return False
        was_open = self.attached is not None
        self.attached = None
        async with self._change:
            if not self.pool.is_dead:
                await self.pool.call_all("rollmatch_close")
        return was_open

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
