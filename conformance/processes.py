"""Commands in processes of their own; Python commands fork from a ``multiprocessing`` forkserver.

It imports ``PRELOAD`` (torch, transformers, vLLM) once for each test process, which saves every command those seconds.
"""

import atexit
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import set_forkserver_preload
from pathlib import Path
from types import ModuleType

from rollmatch.cli.processes import has_gpu

ROOT = Path(__file__).parents[1]
LEARNER = [
    *("torch.distributed", "peft", "transformers.models.auto.processing_auto"),
    *(f"transformers.models.qwen3_vl.{name}_qwen3_vl" for name in ("modeling", "processing")),
    *(f"rollmatch.cli.{name}" for name in ("run", "planning", "learner_launcher", "rollout_server")),
]
ENGINE = [
    *("setproctitle", "vllm.entrypoints.llm", "vllm.entrypoints.openai.api_server", "vllm.v1.worker.cpu_worker"),
    *(f"vllm.model_executor.models.{name}" for name in ("qwen3", "qwen3_vl")),
    "rollmatch.cli.serving",
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
        os.setsid()
        output = os.open(self.log, os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        with suppress(ImportError):  # comes with vLLM, which names its workers; works before the environment changes
            from setproctitle import setproctitle

            setproctitle(" ".join([sys.executable, *self.words]))
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(ROOT)
        sys.path[1:1] = self.environment.get("PYTHONPATH", "").split(os.pathsep)
        option, sys.argv[:] = self.words[0], self.words
        try:
            if option == "-m":
                del sys.argv[0]
                runpy.run_module(self.words[1], run_name="__main__", alter_sys=True)
            elif option == "-c":
                del sys.argv[1]
                sys.modules["__main__"] = ModuleType("__main__")
                exec(self.words[1], vars(sys.modules["__main__"]))
            else:
                runpy.run_path(option, run_name="__main__")
        finally:
            atexit._run_exitfuncs()  # multiprocessing leaves them out


def start(
    command: Sequence[str], log: Path, *, environment: Mapping[str, str] = os.environ
) -> Forked | subprocess.Popen[bytes]:
    """Start in a session of its own with its output in ``log``; beside a GPU never by a fork."""
    if command[0] == sys.executable and not has_gpu():
        return Forked(command[1:], log, environment)
    with log.open("w") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
