"""Commands in processes of their own: start, wait, end. Python commands fork from a ``multiprocessing`` forkserver.

It imports ``PRELOAD`` (torch, transformers, vLLM) once for each test process, which saves every command those seconds.
"""

import atexit
import gc
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import set_forkserver_preload
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import requests

from rollmatch.run.machine import has_gpu

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S, END_TIMEOUT_S = 300.0, 20.0
LEARNER = [
    "conformance.doubles.forked",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "peft",
    "transformers.models.auto.processing_auto",
    *(f"transformers.models.qwen3_vl.{name}_qwen3_vl" for name in ("modeling", "processing")),
    *(f"rollmatch.{name}" for name in ("run.lifecycle", "cli.plan", "launch.learner", "launch.rollout_server")),
]
ENGINE = [
    "setproctitle",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.worker.cpu_worker",
    *(f"vllm.model_executor.models.{name}" for name in ("qwen3", "qwen3_vl")),
    "rollmatch.serve.serving",
    "conformance.doubles.forked_engine",
]
PRELOAD = [*LEARNER]
"""A run with engine tests adds ``ENGINE``."""


class Forked(ForkServerProcess):
    """``python WORD...``, forked; with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        super().__init__()
        self.words, self.log, self.environment = list(words), str(log), dict(environment)
        log.touch()
        set_forkserver_preload(PRELOAD)
        self.start()

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.words, timeout or 0)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def run(self) -> None:
        """In the child: become the command."""
        gc.freeze()  # what the forkserver has loaded
        gc.enable()
        os.setsid()
        output = os.open(self.log, os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        with suppress(ImportError):  # comes with vLLM, which names its workers; works before the environment changes
            from setproctitle import setproctitle

            setproctitle(" ".join([sys.executable, *self.words]))
        os.execve = _execve
        os.chdir(ROOT)
        sys.path[1:1] = self.environment.get("PYTHONPATH", "").split(os.pathsep)
        command: Becoming | None = Becoming(self.words, self.environment)
        try:
            while command:
                command = _run_python(command)
        finally:
            atexit._run_exitfuncs()  # multiprocessing leaves them out


class Becoming(BaseException):
    """A forked process becomes another Python command: what is loaded need not be loaded again."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.words, self.environment = list(words), dict(environment)


def _execve(program: str, words: Sequence[str], environment: Mapping[str, str], *, real: Any = os.execve) -> None:
    """In place of ``os.execve``."""
    if Path(program) == Path(sys.executable):
        raise Becoming(words[1:], environment)
    real(program, words, environment)


def _run_python(command: Becoming) -> Becoming | None:
    """Run ``python WORD...`` here; returns the process that it became."""
    os.environ.clear()
    os.environ.update(command.environment)
    words = [word for word in command.words if word != "-P"]  # as here: nothing of the working directory comes first
    option, sys.argv[:] = words[0], words
    try:
        if option == "-m":
            del sys.argv[0]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif option == "-c":
            del sys.argv[1]
            sys.modules["__main__"] = ModuleType("__main__")
            exec(words[1], vars(sys.modules["__main__"]))
        else:
            sys.path.insert(0, str(Path(option).parent))
            runpy.run_path(option, run_name="__main__")
    except Becoming as becoming:
        return becoming
    return None


def start(
    command: Sequence[str], log: Path, *, environment: Mapping[str, str] = os.environ, fork: bool = True
) -> Forked | subprocess.Popen[bytes]:
    """Start in a session of its own with its output in ``log``; beside a GPU never by a fork."""
    if fork and command[0] == sys.executable and not has_gpu():
        return Forked(command[1:], log, environment)
    with log.open("w") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


class Running:
    """A running command; ``end`` also ends its children and everything else in its session."""

    def __init__(self, process: Forked | subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log
        self._seen: set[psutil.Process] = set()

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait while it runs. Errors: ``AssertionError`` with its output when it ends first or takes longer."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output()[-3000:]}"
            assert time.monotonic() < deadline, f"waited for {timeout_s} s:\n{self.output()[-3000:]}"
            time.sleep(0.05)

    def wait_healthy(self, url: str) -> None:
        """Wait until the server says so."""
        self.wait_until(lambda: is_healthy(url))
        self.members()

    def members(self) -> list[psutil.Process]:
        """Processes that still run: the session's, and all descendants that were ever seen."""
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self.process.pid:
                    self._seen |= {process, *process.children(recursive=True)}
        return [process for process in self._seen if _is_alive(process)]

    def workers(self) -> list[psutil.Process]:
        """Descendants that hold an engine; neither what reads a server's bodies nor what accepts its connections."""
        return [each for each in self.members() if each.pid != self.process.pid and not _is_helper(each)]

    def wait_alone(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """The command has ended; its processes end with it."""
        deadline = time.monotonic() + timeout_s
        while left := self.members():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

    def end(self, *, grace_s: float = END_TIMEOUT_S) -> None:
        """Terminate the command; kill what is left after ``grace_s``."""
        members = self.members()
        with suppress(ProcessLookupError):
            self.process.terminate()
        psutil.wait_procs(members, timeout=grace_s if members else 0)
        for process in self.members():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(timeout=END_TIMEOUT_S)


@contextmanager
def stopped(*running: psutil.Process) -> Iterator[None]:
    """They do nothing inside; one that has ended is passed over."""

    def send_all(number: int) -> None:
        for process in running:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.send_signal(number)

    send_all(signal.SIGSTOP)
    try:
        yield
    finally:
        send_all(signal.SIGCONT)


RUNNING_S, STOPPED_S = 0.005, 0.02


@contextmanager
def stopped_when(is_reached: Callable[[], bool], *running: psutil.Process) -> Iterator[None]:
    """They do nothing inside, and something is reached that they would soon leave behind.

    They run and stand still in turn until then, so that it is seen on a busy machine, too.
    """
    while True:
        time.sleep(RUNNING_S)
        with stopped(*running):
            time.sleep(STOPPED_S)  # until what they wrote last is read
            if is_reached():
                yield
                return


def is_healthy(url: str) -> bool:
    """Whether a server answers, and says so; stock servers know the route without a slash only."""
    try:
        return any(requests.get(f"{url}/health{end}", timeout=5).status_code == 200 for end in ("/", ""))
    except requests.RequestException:
        return False


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_helper(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        command = " ".join(process.cmdline())
        return any(name in command for name in ("tracker", "forkserver", "rollmatch/server/front.py"))
    return True
