"""Rollout servers as they are started: a process of its own, its output in a file, ended with all its workers."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import requests

from conformance.processes import start
from conformance.rollout.digits import MODEL, ROOT
from conformance.server.calls import Server
from rollmatch.server.settings import KEY_VARIABLE, ServerSettings

START_TIMEOUT_S, END_TIMEOUT_S = 300, 20
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
ENGINE = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 128 << 20,
    "max_num_seqs": 64,
    "limit_mm_per_prompt": {"image": 1, "video": 0},
}


_GIVEN = set()


def free_port():
    """Outside the range from which outgoing connections take theirs, never twice, and no other test worker's.

    Not drawn from ``random``: a trainer seeds it, and two workers with one seed would draw the same ports.
    """
    worker, num_workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    while True:
        port = 20000 + random.SystemRandom().randrange(10000 // int(num_workers)) * int(num_workers) + int(worker[2:])
        with socket.socket() as probe:
            if port not in _GIVEN and probe.connect_ex(("127.0.0.1", port)):
                _GIVEN.add(port)
                return port


def settings_for(**fields):
    told = {"model": str(MODEL), "dtype": "float32", "max_model_len": 512, "port": free_port()}
    return ServerSettings(**(told | {"engine_arguments": ENGINE, "image_roots": (str(ROOT / "fixtures"),)} | fields))


class Instance:
    """A running server."""

    def __init__(self, settings, log):
        self.settings, self.log = settings, log
        self.url = f"http://127.0.0.1:{settings.port}"
        key = settings.api_key
        command = [sys.executable, "-m", "rollmatch.cli.server_process", settings.to_json()]
        environment = os.environ | ENVIRONMENT | ({KEY_VARIABLE: key} if key else {})
        self.process = start(command, log, environment=environment)
        self.server = Server(self.url, key=key)

    def told(self):
        return self.log.read_text(errors="replace")

    def wait_ready(self):
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.told()[-3000:]}"
            assert time.monotonic() < deadline, self.told()[-3000:]
            try:
                if requests.get(self.url + "/health/", timeout=5).status_code == 200:
                    return self
            except requests.ConnectionError:
                time.sleep(0.2)

    def members(self):
        """Processes of its session: itself and its workers."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    with open(f"/proc/{entry}/stat") as file:
                        fields = file.read().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    found.append(int(entry))
        return found

    def workers(self):
        """Its engines' processes."""
        return [pid for pid in self.members() if b"EngineCore" in _command_of(pid)]

    def leave(self):
        """A signal ends it and leaves no process behind."""
        self.process.terminate()
        self.process.wait(timeout=END_TIMEOUT_S)
        deadline = time.monotonic() + END_TIMEOUT_S
        while left := self.members():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

    def end(self):
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=END_TIMEOUT_S)
        for pid in self.members():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _command_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


@contextmanager
def running(log, **fields):
    instance = Instance(settings_for(**fields), log)
    try:
        yield instance.wait_ready()
    finally:
        instance.end()
