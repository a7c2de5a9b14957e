"""Our rollout server over an engine that only receives; a process of its own, as the real one.

Run as a script: ``receiving_server.py PORT NUM_TENSORS NUM_FLOATS``. The application, its HTTP, the group and the
receiver are the real ones; in place of vLLM's model stands one that takes tensors and forgets them.
"""

import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import requests
import torch
import uvicorn

from conformance.doubles.digits import MODEL, ROOT
from conformance.doubles.instance import free_port
from rollmatch.dialects.native.group import Rendezvous
from rollmatch.dialects.native.sender import NativeSender
from rollmatch.dialects.session import ClientSettings, RolloutServer
from rollmatch.serve.app import make_app
from rollmatch.serve.serving import vocabulary_size
from rollmatch.server.engine_pool import EnginePool
from rollmatch.server.identity import Model
from rollmatch.server.images import ImageReader
from rollmatch.server.payloads import TensorSpec
from rollmatch.server.prompts import PromptMaker
from rollmatch.server.settings import ServerSettings
from rollmatch.server.state import assemble
from rollmatch.weights.worker.extension import WorkerExtension

START_TIMEOUT_S, END_TIMEOUT_S, POLL_S, TIMEOUT_S = 240, 10, 0.1, 20.0


class ForgetfulModel(torch.nn.Module):
    def load_weights(self, weights):
        for _ in weights:
            pass


class ReceivingReplica(WorkerExtension):
    """A replica whose only worker is itself."""

    rank, device = 0, torch.device("cpu")
    model_runner = SimpleNamespace(get_model=ForgetfulModel)

    async def call(self, method, *arguments):
        return [getattr(self, method)(*arguments)]

    async def reset_caches(self):
        return True

    def is_dead(self):
        return False

    def unfinished_tokens(self):
        return {}

    def close(self):
        self.rollmatch_close()


def weights_of(num_tensors, num_floats):
    """Name and tensor of everything that the server holds."""
    return [(f"layer.{place}.weight", torch.full((num_floats,), float(place))) for place in range(num_tensors)]


def make_server(port, num_tensors, num_floats):
    settings = ServerSettings(model=str(MODEL), dtype="float32", max_model_len=64, port=port)
    specs = [
        TensorSpec(name=name, dtype="float32", shape=tuple(tensor.shape))
        for name, tensor in weights_of(num_tensors, num_floats)
    ]
    model = Model(directory=settings.model, tensors={spec.name: spec for spec in specs}, aliases={})
    size = vocabulary_size(settings.model)
    prompts = PromptMaker(settings.model, vocabulary_size=size, reader=ImageReader(()))
    return make_app(assemble(settings, model=model, prompts=prompts, pool=EnginePool([ReceivingReplica()])))


@contextmanager
def receiving(num_tensors, num_floats, *, num_servers=1):
    """URLs of running ones, which start at the same time."""
    ports = [free_port() for _ in range(num_servers)]
    script = [sys.executable, "-m", "benchmarks.sync.receiving_server"]
    processes = [subprocess.Popen([*script, *map(str, (port, num_tensors, num_floats))], cwd=ROOT) for port in ports]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for process, url in zip(processes, urls, strict=True):
            wait_ready(process, url)
        yield urls
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=END_TIMEOUT_S)


@contextmanager
def native_sender(url):
    """A learner's sender to that server."""
    server = RolloutServer(url, ClientSettings(timeout_s=240))
    server.connect()
    rendezvous = Rendezvous(
        host="127.0.0.1", port=free_port(), client="learner", timeout_s=TIMEOUT_S, join_timeout_s=TIMEOUT_S
    )
    sender = NativeSender([server], rendezvous, stage=False)
    yield sender
    sender.close()


def wait_ready(process, url):
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < deadline, "does not start"
        with suppress(requests.ConnectionError):
            status = requests.get(f"{url}/health/", timeout=5).status_code
            assert status != 500, "fails"
            if status == 200:
                return
        time.sleep(POLL_S)


if __name__ == "__main__":
    http_port, *sizes = map(int, sys.argv[1:])
    uvicorn.run(make_server(http_port, *sizes), port=http_port, log_level="warning", access_log=False)
