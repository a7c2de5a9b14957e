"""Teachers with real engines: an unmodified ``vllm serve``, and our own server."""

import os
import sys
from contextlib import contextmanager

import pytest

from conformance.doubles.distilled import DIVERGENCE, MODEL, PROMPTED, checked, make_trainer, steps_of
from conformance.doubles.instance import ENGINE, ENVIRONMENT, free_port, running
from conformance.doubles.processes import Running, start

pytestmark = pytest.mark.engine


@contextmanager
def stock(tmp_path_factory):
    port, log = free_port(), tmp_path_factory.mktemp("teacher") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    options = {
        "model": MODEL, "host": "127.0.0.1", "port": port, "dtype": "float32", "max-model-len": 256,
        "max-num-seqs": 16, "kv-cache-memory-bytes": 128 << 20, "max-logprobs": 8,
    }  # fmt: skip
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    server = Running(start(command, log, environment=os.environ | ENVIRONMENT), log)
    try:
        server.wait_healthy(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.end()


@contextmanager
def ours(tmp_path_factory):
    arguments = {"enforce_eager": True, "kv_cache_memory_bytes": ENGINE["kv_cache_memory_bytes"], "max_logprobs": 8}
    log = tmp_path_factory.mktemp("ours") / "log"
    with running(log, model=str(MODEL), max_model_len=256, engine_arguments=arguments) as instance:
        yield instance.url


SERVERS = [pytest.param(stock, id="vllm serve", marks=pytest.mark.wide), pytest.param(ours, id="rollmatch serve")]


@pytest.fixture(scope="module", params=SERVERS)
def url(request, tmp_path_factory):
    with request.param(tmp_path_factory) as found:
        yield found


@pytest.mark.scenario(clauses=["distillation/a-teacher-may-be-a-server#1,2,8"])
def test_a_server_teaches_what_the_same_model_teaches_here(tmp_path, url):
    teachers = f'custom.extra.distill.teachers=[{{base_url: "{url}", prompt: "{{question}} {{sum}}"}}]'
    assert checked(teachers, *DIVERGENCE) == []
    (error,) = checked(teachers, *DIVERGENCE, "custom.extra.distill.top_k=9")
    assert error.code == "teacher-without-logprobs"
    figures = []
    for name, entry in (("here", PROMPTED), ("there", teachers)):
        trainer = make_trainer(tmp_path / name, entry, *DIVERGENCE)
        trainer.train()
        figures.append([steps_of(trainer)[0][figure] for figure in ("teacher_kl", "divergence")])
    assert figures[1] == pytest.approx(figures[0], rel=1e-4)
