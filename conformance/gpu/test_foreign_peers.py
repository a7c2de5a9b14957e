"""Weights over NCCL: from our learner to servers, most of them other people's, and from TRL's trainer to ours."""

import json
import os
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conformance.doubles.digits import ROOT
from conformance.doubles.division import VLLM, typed
from conformance.doubles.instance import free_port
from conformance.doubles.one_step import take_steps
from conformance.doubles.started import finish, started
from conformance.gpu.places import place, put_at
from conformance.gpu.trl_trainer import MAX_TOKENS, MODEL, NUM_PROMPTS, NUM_STEPS, prompts

ARITHMETIC = ROOT / "fixtures/arithmetic/grpo.yaml"
ENGINE = {
    "dtype": "float32", "max-model-len": "64", "enforce-eager": "true", "gpu-memory-utilization": "0.1",
    "host": "127.0.0.1",
}  # fmt: skip
TRL = [sys.executable, "-c", "import sys; from trl.cli import main; sys.exit(main())", "vllm-serve"]
VLLM_SERVE = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
STOCK_OPTIONS = [
    *("--logprobs-mode", "processed_logprobs"),
    *("--weight-transfer-config", json.dumps({"backend": "nccl"})),
]


def spelled(words, joint="-"):
    """As options of a command line; TRL's are joined by underscores."""
    return [word for name, value in words.items() for word in (f"--{name.replace('-', joint)}", value)]


def trl_server(port):
    return [*TRL, *spelled({**ENGINE, "model": str(MODEL), "port": str(port)}, "_")]


def stock_server(port):
    words = {name: value for name, value in ENGINE.items() if name != "enforce-eager"} | {"port": str(port)}
    return [*VLLM_SERVE, str(MODEL), *STOCK_OPTIONS, "--enforce-eager", *spelled(words)]


def our_server(port):
    settings = {
        "mode": "server",
        "server.base_url": f"http://127.0.0.1:{port}",
        "server.group_port": free_port(),
        "enforce_eager": True,
        "kv_cache_memory_mib": 1024,
    }
    overrides = [f"model.model={MODEL}", *(f"{VLLM}.{key}={value}" for key, value in settings.items())]
    return typed("serve", ARITHMETIC, "0", overrides)


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


def greedy_answers_of_transformers(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).cuda().eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    answers = []
    for prompt in prompts()[:NUM_PROMPTS]:
        ids = tokenizer(prompt, return_tensors="pt").to("cuda")
        whole = model.generate(**ids, do_sample=False, max_new_tokens=MAX_TOKENS)
        answers.append(whole[0, ids["input_ids"].shape[1] :].tolist())
    return answers
