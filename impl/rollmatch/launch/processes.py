"""GPUs of a command, child processes that never outlive it, and commands this process becomes."""

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import psutil

from rollmatch.errors import LaunchError

PYTHON = (sys.executable, "-P")
"""Begins commands of ours: with ``-m`` alone, a ``random.py`` of the working directory would be Python's own."""


def parse_gpus(text: str) -> tuple[str, ...]:
    """The list behind ``--gpus``. Errors: ``gpu-list-invalid``.

    >>> parse_gpus("0,1, 2")
    ('0', '1', '2')
    """
    gpus = tuple(part.strip() for part in text.split(","))
    odd = [gpu for gpu in gpus if not re.fullmatch(r"\d+|(GPU|MIG)-[\w-]+", gpu)]
    if odd or len(set(gpus)) < len(gpus):
        problem = f"{odd[0]!r} is not a GPU" if odd else f"{text!r} names a GPU twice"
        raise LaunchError(
            problem,
            code="gpu-list-invalid",
            key="--gpus",
            remedy="Write numbers with commas between them, such as 0,1,2.",
        )
    return gpus


def visible(gpus: Sequence[str]) -> Mapping[str, str]:
    """The variable that shows a process these GPUs only; without effect on a machine that has none."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


PR_SET_PDEATHSIG = 1
"""``prctl`` option of Linux: the signal that a process gets when the one that started it ends."""


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when the one that started it is killed. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


PR_SET_CHILD_SUBREAPER = 36
"""``prctl`` option of Linux: processes whose parent has ended become children of this one."""


def adopt_orphans() -> None:
    """Have the kernel give this process what its children leave behind when they are killed. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_orphans() -> None:
    """Kill all descendants of this process; torchrun's ranks lead sessions of their own, which outlive its launcher."""
    while family := psutil.Process().children(recursive=True):
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in family:
            with contextlib.suppress(ChildProcessError):  # one that becomes ours as soon as its parent is gone
                os.waitpid(process.pid, 0)


GRACE_S = 600.0
"""Time a child has to end by itself after a signal: a learner ends its step and writes a checkpoint in it."""


def forwarded() -> tuple[signal.Signals, ...]:
    """Signals that a launcher takes, and passes on; under ``nohup``, the end of a terminal is none of them."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return numbers if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else numbers[:2]


def run_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    grace_s: float = GRACE_S,
    check: Callable[[], None] = lambda: None,
    has_begun: Callable[[], bool] = lambda: True,
) -> int:
    """Run to its end; a second signal is the end at once. Returns the exit code, or 128 + the signal that was it.

    ``check`` is called about once a second; an error that it raises is the child's end, too. Until ``has_begun``, there
    is nothing to save, and the first signal is the end.
    """
    child = psutil.Popen(command, env={**os.environ, **environment}, start_new_session=True, preexec_fn=end_with_parent)
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        is_request = len(received) == 1 and has_begun()
        for process in _addressees(child) if is_request else _family(child):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number if is_request else signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in forwarded()}
    try:
        code = _wait(child, received, grace_s, check)
    finally:
        kill_family(child)
        for number, handler in before.items():
            signal.signal(number, handler)
    if received and code:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


def shell_line(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The command as one would type it, variables in front."""
    words = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*words, *(shlex.quote(part) for part in command)])


def _family(child: psutil.Popen) -> list[psutil.Process]:
    """The child and all its descendants; a process group is not enough, because torchrun gives each rank a session."""
    try:
        return [*child.children(recursive=True), child]
    except psutil.NoSuchProcess:
        return []


def _addressees(child: psutil.Popen) -> list[psutil.Process]:
    """The ranks, if there are any: torchrun would kill them after 30 seconds, too few for a large checkpoint."""
    ranks = []
    for process in _family(child):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if "LOCAL_RANK" in process.environ():
                ranks.append(process)
    return ranks or _family(child)[-1:]


def _wait(child: psutil.Popen, received: list[int], grace_s: float, check: Callable[[], None]) -> int:
    """Wait for its exit code; after a signal at most ``grace_s``. Errors: those of ``check``, without a signal."""
    left_s = grace_s
    while left_s > 0:
        try:
            return int(child.wait(timeout=1.0))
        except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
            left_s -= 1.0 if received else 0.0
        if not received:
            check()
    print(f"rollmatch: still running {grace_s:g} s after signal {received[0]}, killed", file=sys.stderr)
    return -signal.SIGKILL


KILLED_S = 10.0
"""Time the kernel has to end a process that was killed: one that waits for a device or a file ends late."""


def kill_family(child: psutil.Popen) -> None:
    """Kill a child that leads a session, all its descendants and whoever else is in its session's group.

    Returns when all these descendants have ended, or after ``KILLED_S``.
    """
    family = _family(child)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + KILLED_S
    while not all(map(_has_ended, family)) and time.monotonic() < deadline:
        time.sleep(0.01)  # they are no children of this process, so there is nothing to wait on


def _has_ended(process: psutil.Process) -> bool:
    """Whether it is gone, or a zombie whose parent has not asked for its code."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What would be run, and with what added to the environment."""

    words: tuple[str, ...]
    environment: dict[str, str]

    def __str__(self) -> str:
        return shell_line(self.words, dict(sorted(self.effective().items())))

    def effective(self) -> dict[str, str]:
        """The variables with the values that they would have: what the user has set stays."""
        return {
            name: value if name == "CUDA_VISIBLE_DEVICES" else os.environ.get(name, value)
            for name, value in self.environment.items()
        }


def become(command: Command) -> NoReturn:
    """Replace this process; what the user has set in the environment stays. Errors: ``swift-missing``."""
    program = shutil.which(command.words[0])
    if program is None:
        problem = f"{command.words[0]} is not installed"
        remedy = "Install it: pip install ms-swift==4.6.0 qwen_vl_utils."
        raise LaunchError(problem, code="swift-missing", key="custom.extra.rollout_server.engine", remedy=remedy)
    os.execve(program, command.words, os.environ | command.effective())
