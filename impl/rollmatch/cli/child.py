"""A command of ours as a child: it gets the signals we get, and nothing of it is left when we end."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

import psutil

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 600.0
"""Time a child has to end by itself after a signal: a learner ends its step and writes a checkpoint in it."""


def run_child(command: Sequence[str], environment: Mapping[str, str], *, grace_s: float = GRACE_S) -> int:
    """Run to its end; a second signal is the end at once. Returns the exit code, or 128 + the signal that was it."""
    child = psutil.Popen(command, env={**os.environ, **environment}, start_new_session=True)
    taken: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        taken.append(number)
        for process in _addressees(child) if len(taken) == 1 else _family(child):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number if len(taken) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in FORWARDED}
    try:
        code = _wait(child, taken, grace_s)
    finally:
        _kill(child)
        for number, handler in before.items():
            signal.signal(number, handler)
    if taken and code:
        return 128 + taken[0]
    return code if code >= 0 else 128 - code


def tell_command(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The command as one would type it, variables in front."""
    words = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*words, *(shlex.quote(part) for part in command)])


def _family(child: psutil.Popen) -> list[psutil.Process]:
    """The child and all that came of it; torchrun gives each rank a session of its own, so that ours is not enough."""
    try:
        return [*child.children(recursive=True), child]
    except psutil.NoSuchProcess:
        return []


def _addressees(child: psutil.Popen) -> list[psutil.Process]:
    """Ranks where there are some: torchrun would give them 30 seconds only, too few for a large checkpoint."""
    ranks = []
    for process in _family(child):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if "LOCAL_RANK" in process.environ():
                ranks.append(process)
    return ranks or _family(child)[-1:]


def _wait(child: psutil.Popen, taken: list[int], grace_s: float) -> int:
    """Its exit code; after a signal it has ``grace_s`` left."""
    left_s = grace_s
    while left_s > 0:
        try:
            return int(child.wait(timeout=1.0))
        except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
            left_s -= 1.0 if taken else 0.0
    print(f"rollmatch: still running {grace_s:g} s after signal {taken[0]}, killed", file=sys.stderr)
    return -signal.SIGKILL


def _kill(child: psutil.Popen) -> None:
    """Whoever of the family is still there goes now."""
    for process in _family(child):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
