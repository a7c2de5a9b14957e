"""A command that forks from a process that has loaded what it needs, in place of loading it; used as one uses Popen."""

import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rollmatch.cli.processes import has_gpu

MODEL_LOADED = (
    "safetensors.torch",
    *(
        f"transformers.models.{name}"
        for name in ("auto.processing_auto", "qwen3_vl.modeling_qwen3_vl", "qwen3_vl.processing_qwen3_vl")
    ),
)
TESTS = (
    *("pytest", "_pytest.assertion.rewrite", "_pytest.legacypath", "hypothesis", "hypothesis.strategies"),
    *("hypothesis.internal.conjecture.engine", "fastapi", "starlette.testclient", "uvicorn", "prometheus_client"),
    *("jsonschema", "markdown_it", "responses", "scipy.optimize"),
)
"""What tests of most rooms load."""
LEARNER = (
    *(f"rollmatch.cli.{name}" for name in ("run", "planning", "learner", "rollout_server")),
    *("peft", "conformance.trainer.overlapped", "conformance.trainer.turns", "PIL.PngImagePlugin"),
    *(*MODEL_LOADED, *TESTS),
)
"""What learners load, and test workers."""
ENGINE = (
    *("vllm.entrypoints.llm", "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"),
    *("vllm.model_executor.models.qwen3", "vllm.model_executor.models.qwen3_vl"),
    *("vllm.model_executor.layers.quantization.online.base", "rollmatch.cli.serving"),
    *LEARNER,
)
"""What servers and colocated learners load."""
COLLECT = "--collect-only"
"""Comes before the tests that are loaded, too."""
ROOT = Path(__file__).parents[2]
LOAD_TIMEOUT_S = 120
_open: dict[str, socket.socket] = {}
"""Address -> the connection that keeps a nursery alive as long as this process is."""


class Forked:
    """The part of ``subprocess.Popen`` that tests ask for; without a log it takes the streams of this process."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        loaded: tuple[str, ...],
        log: Path | None,
        environment: dict[str, str],
        folder: Path = ROOT,
    ) -> None:
        self.returncode: int | None = None
        self._connection = _connect(_nursery_of(loaded))
        order = {"words": list(words), "log": log and str(log), "environment": environment, "folder": str(folder)}
        streams = [] if log else [0, 1, 2]
        socket.send_fds(self._connection, [json.dumps(order).encode()], streams)
        self.pid = int(json.loads(self._connection.recv(1024))["process_id"])

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.returncode = int(json.loads(self._connection.recv(1024))["code"])
            self._connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Errors: ``TimeoutExpired``."""
        if self.returncode is None and not select.select([self._connection], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("forked", timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def start(
    command: Sequence[str], *, loaded: tuple[str, ...], log: Path, environment: dict[str, str]
) -> "Forked | subprocess.Popen[bytes]":
    """In a session of its own; forked where it is Python and names what it loads, but never beside a GPU."""
    if loaded and not has_gpu():
        return Forked(command[1:], loaded=loaded, log=log, environment=environment)
    with log.open("w") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_to_end(
    command: Sequence[str], log: Path, *, environment: Mapping[str, str] = os.environ, timeout_s: float = 120
) -> tuple[int, str]:
    """Exit code and output of Python with what tests load. Errors: ``TimeoutExpired``."""
    process = start(command, loaded=LEARNER, log=log, environment=dict(environment))
    try:
        return process.wait(timeout=timeout_s), log.read_text(errors="replace")
    finally:
        process.kill()


def this_run() -> str:
    """What all test workers of a run have in common."""
    return os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))


def keep(loaded: tuple[str, ...]) -> None:
    """Load this now, for all that forks as long as this process is there."""
    _nursery_of(loaded)


def _nursery_of(loaded: tuple[str, ...]) -> str:
    """The address of one for all test workers of a run; it may have to start."""
    kind = [this_run(), os.environ.get("ROLLMATCH_FAULT", ""), *loaded]
    name = hashlib.sha256("\n".join(kind).encode()).hexdigest()[:16]
    address = f"{tempfile.gettempdir()}/rollmatch-{name}"
    if address not in _open:
        with open(f"{address}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(FileNotFoundError, ConnectionRefusedError):
                _open[address] = _connect(address)
            if address not in _open:
                Path(address).unlink(missing_ok=True)
                _start_nursery(address, loaded)
                _open[address] = _connect(address)
    return address


def _start_nursery(address: str, loaded: tuple[str, ...]) -> None:
    """One that has collected tests forks from one that has loaded modules."""
    modules, tests = divided(loaded)
    words = ["-m", "conformance.cli.nursery", address, *(tests or modules)]
    nursery: Forked | subprocess.Popen[bytes]
    if tests:
        nursery = Forked(words, loaded=modules, log=None, environment=dict(os.environ), folder=Path.cwd())
    else:
        nothing = subprocess.DEVNULL  # it outlives who starts it
        nursery = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdin=nothing, start_new_session=True)
    deadline = time.monotonic() + LOAD_TIMEOUT_S
    while not os.path.exists(address):
        assert nursery.poll() is None, "the nursery ended"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def divided(loaded: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modules, and what to tell pytest if there are tests as well.

    >>> divided(("torch", "peft", "--collect-only", "conformance/spec"))
    (('torch', 'peft'), ('--collect-only', 'conformance/spec'))
    """
    place = loaded.index(COLLECT) if COLLECT in loaded else len(loaded)
    return tuple(loaded[:place]), tuple(loaded[place:])


def _connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    return connection
