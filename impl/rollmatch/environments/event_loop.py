"""The event loop of users' coroutines: one for the life of the process, as HTTP clients keep connections of it."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from rollmatch.startup import start_thread

Result = TypeVar("Result")
_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""Process id -> its loop; a fork has none yet."""
_lock = threading.Lock()


class NotDone(Exception):
    """A coroutine did not end in time."""


def run_coroutine(coroutine: Coroutine[Any, Any, Result], *, timeout_s: float | None = None) -> Result:
    """Its result, waited for; from any thread but the loop's own. Errors: ``NotDone``, what it raises.

    >>> async def loop():
    ...     return id(asyncio.get_running_loop())
    >>> run_coroutine(loop()) == run_coroutine(loop())
    True
    """
    pending = asyncio.run_coroutine_threadsafe(_without_exit(coroutine), _loop())
    try:
        result = pending.result(timeout_s)
    except TimeoutError as error:
        if pending.done():
            raise
        raise NotDone from error
    finally:
        pending.cancel()  # without effect where it has ended; Ctrl-C ends the wait, too
    if isinstance(result, _Exit):
        raise result.error
    return result


@dataclass(frozen=True, slots=True)
class _Exit:
    """What a coroutine raised to end its process."""

    error: BaseException


async def _without_exit(coroutine: Coroutine[Any, Any, Result]) -> Result | _Exit:
    """Its result; an exit would end the loop, and whoever waits for it later would wait for ever."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        return _Exit(error)


def _loop() -> asyncio.AbstractEventLoop:
    with _lock:
        if os.getpid() not in _loops:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            start_thread(loop.run_forever, name="coroutines")
        return _loops[os.getpid()]
