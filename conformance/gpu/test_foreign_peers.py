"""Weights over NCCL: from our learner to servers, most of them other people's, and from TRL's trainer to ours."""

import json
import os
import sys

import pytest

from conformance.doubles.digits import ROOT
from conformance.doubles.instance import free_port
from conformance.doubles.one_step import take_steps
from conformance.doubles.started import finish, started
from conformance.gpu.peers import (
    ARITHMETIC,
    ENGINE,
    STOCK_OPTIONS,
    TRL,
    VLLM_SERVE,
    greedy_answers_of_transformers,
    our_server,
    spelled,
)
from conformance.gpu.places import place, put_at
from conformance.gpu.trl_trainer import MODEL, NUM_STEPS


def trl_server(port):
    return [*TRL, *spelled({**ENGINE, "model": str(MODEL), "port": str(port)}, "_")]


def stock_server(port):
    words = {name: value for name, value in ENGINE.items() if name != "enforce-eager"} | {"port": str(port)}
    return [*VLLM_SERVE, str(MODEL), *STOCK_OPTIONS, "--enforce-eager", *spelled(words)]


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    "make_command",
    [
        pytest.param(trl_server, id="trl"),
        pytest.param(stock_server, id="vllm"),
        pytest.param(our_server, id="ours"),
    ],
)
def test_a_server_answers_by_the_weights_of_every_step(tmp_path, monkeypatch, make_command):
    port = free_port()
    variables = place(0) | {"VLLM_SERVER_DEV_MODE": "1"}
    with started(make_command(port), tmp_path / "server.txt", **variables) as server:
        server.wait_healthy(f"http://127.0.0.1:{port}")
        put_at(1, tmp_path, monkeypatch)
        overrides = ("custom.extra.grpo.eval_temperature=0", "training.lr_scheduler_type=constant")
        try:
            take_steps(ARITHMETIC, f"http://127.0.0.1:{port}", tmp_path, *overrides, num_steps=3)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{server.output()[-3000:]}") from error


@pytest.mark.gpu(1)
def test_our_server_answers_by_the_weights_of_trl_s_trainer(tmp_path):
    port, group_port, out = free_port(), free_port(), tmp_path / "run"
    url = f"http://127.0.0.1:{port}"
    trainer = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"),
        *("-m", "conformance.gpu.trl_trainer", url, str(group_port), str(out)),
    ]
    with started(our_server(port), tmp_path / "server.txt", **place(0)) as server:
        server.wait_healthy(url)
        variables = place(1) | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])}
        code, output = finish(trainer, tmp_path / "trainer.txt", **variables)
        assert code == 0, output[-3000:] + server.output()[-3000:]
    noted = json.loads((out / "answers.json").read_text())
    assert noted[0] == greedy_answers_of_transformers(MODEL)
    for step in range(1, NUM_STEPS):
        assert noted[step] != noted[step - 1], "a server with old weights would be found out"
        assert noted[step] == greedy_answers_of_transformers(out / f"checkpoint-{step}")
