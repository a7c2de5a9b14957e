"""Updates that are written in place of the served weights: nothing is generated from the first byte to the commit."""

import asyncio

from rollmatch.errors import SyncError
from rollmatch.server.communicator import Attached
from rollmatch.server.engine_pool import BROKEN, SERVING, UPDATING, WRITING
from rollmatch.server.payloads import SyncRequest
from rollmatch.server.update import Committed, Update


class NothingKeptBeside(SyncError):
    """What is written in place is committed in the same call."""

    code = "in-place-not-staged"
    status = 400


async def write_in_place(update: Update, request: SyncRequest) -> Committed:
    """Receive, verify, serve; goes through to its end even if the caller hangs up, whose group is closed then.

    Errors: ``NothingKeptBeside``, those of ``Update.stage``; afterwards the old weights serve if none was touched,
    else none do.
    """
    attached = update.communicator.check_attached(request.client)
    if not request.commit:
        remedy = "Announce with commit: true, or open a communicator with transport gloo."
        raise NothingKeptBeside("weights in place cannot be kept beside", key="commit", remedy=remedy)
    update.check_order(request)
    update.check(request)
    update.is_busy = True
    task = asyncio.ensure_future(_write(update, request))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        update.clean(_leave(update, attached, task))
        raise


async def _leave(update: Update, attached: Attached, task: asyncio.Task[Committed]) -> None:
    await update.communicator.close(only=attached)
    await asyncio.wait([task])
    task.exception()  # told to nobody: the caller is gone


async def _write(update: Update, request: SyncRequest) -> Committed:
    pool = update.pool
    try:
        async with pool.quiet(drain_s=update.drain_s) as num_restarted:
            pool.state = WRITING
            try:
                staged = await update.receive(request, in_place=True)
            except BaseException:
                pool.state = BROKEN  # whatever asking for it brings
                pool.state = UPDATING if await _is_whole(update) else BROKEN
                raise
            pool.policy_version, pool.state = request.version, SERVING
        return Committed(staged=staged, commit_s=0.0, num_restarted=num_restarted)
    finally:
        update.is_busy = False


async def _is_whole(update: Update) -> bool:
    """Whether every worker holds weights of one version; forgets what failed."""
    told = await update.pool.call_all("rollmatch_whole")
    if update.communicator.attached is not None:
        await update.pool.call_all("rollmatch_drop")
    return all(answer["whole"] for answer in told)
