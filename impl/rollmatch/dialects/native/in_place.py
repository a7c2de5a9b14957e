"""Weights that are written over the served ones (direct): nothing is generated from the first byte to the commit."""

import asyncio
from contextlib import suppress

from rollmatch.dialects.native.sync_routes import Committed, Update
from rollmatch.errors import RollmatchError, SyncError
from rollmatch.server.communicator import Attached
from rollmatch.server.engine_pool import BROKEN, SERVING, UPDATING, WRITING
from rollmatch.server.payloads import SyncRequest


class StagingRefused(SyncError):
    """What is written in place is committed in the same call."""

    code = "in-place-not-staged"
    status = 400


class InPlaceUpdate:
    """An update whose weights are received where the served ones lie."""

    def __init__(self, update: Update) -> None:
        self.update = update
        self.pool, self.communicator = update.pool, update.communicator

    async def write(self, request: SyncRequest) -> Committed:
        """Receive, verify, serve; completes even if the caller hangs up, whose group is closed then.

        Errors: ``StagingRefused``, as ``stage``; afterwards the old weights serve if none was touched, else none do.
        """
        self.communicator.check_attached(request.client)
        if not request.commit:
            problem = "adapters, and weights of GPUs that hold parts of a model, are written in place"
            remedy = "Announce with commit: true (sync.stage: false), or use transport gloo."
            raise StagingRefused(problem, key="commit", remedy=remedy)
        attached = self.update.begin(request)
        task = self.update.run_on(self._write(request))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.update.run_on(self._leave(attached, task))
            raise

    async def _write(self, request: SyncRequest) -> Committed:
        pool = self.pool
        try:
            async with pool.quiet(drain_s=self.communicator.drain_s) as num_restarted:
                pool.state = WRITING
                try:
                    staged = await self.update.receive(request, in_place=True)
                except BaseException:
                    pool.state = BROKEN  # also if the next call fails
                    pool.state = UPDATING if await self._is_whole() else BROKEN
                    raise
                pool.policy_version, pool.state = request.version, SERVING
            return Committed(staged=staged, commit_s=0.0, num_restarted=num_restarted)
        finally:
            self.update.is_busy = False

    async def _is_whole(self) -> bool:
        """Whether every worker holds weights of one version; forgets what failed."""
        replies = await self.pool.call_all("rollmatch_whole")
        if self.communicator.attached is not None:
            await self.pool.call_all("rollmatch_drop")
        return all(reply["whole"] for reply in replies)

    async def _leave(self, attached: Attached, task: asyncio.Task[Committed]) -> None:
        """The caller is gone: close its group, then forget how its update ended."""
        await self.communicator.close(only=attached)
        with suppress(RollmatchError):
            await task
