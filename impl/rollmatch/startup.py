"""Coming up and going down without the garbage collector walking through hundreds of loaded modules.

Loading torch, transformers and vLLM makes two million objects, none of them garbage; Python's collector looks through
them over and over while they load, whenever vLLM requests a collection, and several times when the process ends: half
of the seconds in which nothing else happens.
"""

import atexit
import errno
import gc
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn, TextIO, cast

from rollmatch.errors import FAILURES, without_credentials

UNNEEDED = ("sklearn", "datasets")
"""Transformers loads them where they are installed, for ways of decoding and training that are not ours: a second."""
STREAMS = {1: "stdout", 2: "stderr"}
_left_with: list[int] = []
"""Exit code, once ``leave`` was called."""


@contextmanager
def loading() -> Iterator[None]:
    """Import inside what is heavy; the collector waits, and leaves alone what is there afterwards.

    Processes forked later share these objects' memory for the same reason. Where all is there already, nothing is left
    alone: a model of an earlier run would never be freed.
    """
    was_collecting, modules = gc.isenabled(), cast(dict[str, ModuleType | None], sys.modules)
    num_known = len(modules)
    hidden = [name for name in UNNEEDED if modules.setdefault(name, None) is None]  # found again afterwards
    gc.disable()
    try:
        yield
    finally:
        for name in hidden:
            modules.pop(name, None)
        if len(modules) > num_known:
            gc.freeze()
            atexit.register(gc.unfreeze)  # where Python does take objects down, it takes all
        if was_collecting:
            gc.enable()


def start_thread(work: Callable[[], object], *, name: str) -> threading.Thread:
    """Begin some work that cannot keep the process from ending."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def run_process(command: Callable[[], int], *, with_traceback: bool) -> NoReturn:
    """Run a command as this process, and leave with its code: output in any locale, Ctrl-C without a traceback.

    What it writes to stderr, tracebacks and warnings of any library among it, holds no credentials.

    An error that nobody has caught is 1, after its traceback; other ranks wait for the end of this one.
    """
    open_closed_streams()
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr, kind=DiscreetText)
    try:
        leave(command())
    except KeyboardInterrupt:
        if with_traceback:
            raise
        sys.stderr.write("rollmatch: stopped by Ctrl-C\n")
        leave(128 + signal.SIGINT)
    except FAILURES as error:
        sys.excepthook(type(error), error, error.__traceback__)  # torch's names the rank
        leave(1)


def open_closed_streams() -> None:
    """Open ``/dev/null`` where this process was started with a closed stdout or stderr (``>&-``).

    Else the next file that is opened has their number, and gets what libraries and child processes write there.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(nothing, number)
    if nothing > 2:
        os.close(nothing)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for the whole process
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


class _LastingFile(io.FileIO):
    """A descriptor that swallows everything once nobody reads it any more, or once it could not be written."""

    def write(self, data: Any, /) -> int:
        """As ``FileIO``; a closed pipe or terminal becomes ``/dev/null``, a full disk does so after its error.

        Raises:
            OSError: once, with the descriptor's name, where its file cannot be written.
        """
        try:
            return super().write(data)
        except OSError as error:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise OSError(error.errno, error.strerror, STREAMS.get(self.fileno())) from error
        return super().write(data)


class DiscreetText(io.TextIOWrapper):
    """Text without credentials: libraries write URLs with their passwords into errors, warnings and logs."""

    def write(self, text: str, /) -> int:
        """As ``TextIOWrapper``."""
        super().write(without_credentials(text))
        return len(text)


def lasting(stream: TextIO, *, kind: type[io.TextIOWrapper] = io.TextIOWrapper) -> TextIO:
    """The same stream in any locale, which outlives its reader: a run continues if its terminal or ``| head`` ends."""
    try:
        number = stream.fileno() if isinstance(stream, io.TextIOWrapper) else None
    except io.UnsupportedOperation:  # in memory, in tests
        number = None
    if number is None:
        return stream
    stream.flush()
    raw = _LastingFile(number, "wb", closefd=False)
    return kind(io.BufferedWriter(raw), encoding=stream.encoding, errors="backslashreplace", line_buffering=True)


def leave(code: int) -> NoReturn:
    """End this process as Python does, threads and exit functions included, but do not take objects down one by one."""
    _left_with.append(code)
    sys.exit(code)


def _end() -> None:
    """The last exit function, because the first one that is registered is called last."""
    if _left_with:
        logging.shutdown()  # logging may have been imported, and so registered, before
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_left_with[-1])


atexit.register(_end)
