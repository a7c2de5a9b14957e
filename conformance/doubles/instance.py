"""Our rollout server as a process of its own, and free ports."""

import os
import sys
from contextlib import contextmanager

from conformance.doubles.digits import MODEL, ROOT
from conformance.doubles.processes import END_TIMEOUT_S, Running, start
from conformance.judge.calls import Server
from conformance.judge.ports import free_port
from rollmatch.server.settings import KEY_VARIABLE, ServerSettings

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


def settings_for(**fields):
    usual = {"model": str(MODEL), "dtype": "float32", "max_model_len": 512, "port": free_port()}
    return ServerSettings(**(usual | {"engine_arguments": ENGINE, "image_roots": (str(ROOT / "fixtures"),)} | fields))


class Instance(Running):
    """A running server of ours."""

    def __init__(self, settings, log, *, fork=True):
        self.settings, self.url = settings, f"http://127.0.0.1:{settings.port}"
        key = settings.api_key
        command = [sys.executable, "-m", "rollmatch.serve.process", settings.to_json()]
        environment = os.environ | ENVIRONMENT | ({KEY_VARIABLE: key} if key else {})
        super().__init__(start(command, log, environment=environment, fork=fork), log)
        self.server = Server(self.url, key=key)

    def wait_ready(self):
        self.wait_healthy(self.url)
        return self

    def leave(self):
        """A signal ends it and leaves no process behind."""
        self.process.terminate()
        self.process.wait(timeout=END_TIMEOUT_S)
        self.wait_alone()


@contextmanager
def running(log, *, fork=True, **fields):
    instance = Instance(settings_for(**fields), log, fork=fork)
    try:
        yield instance.wait_ready()
    finally:
        instance.end()
