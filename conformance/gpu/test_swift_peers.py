"""ms-swift on GPUs, unmodified: our learner with its server, its learner with ours; and the client of verifiers."""

import os
import subprocess

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conformance.doubles.digits import CONFIG
from conformance.doubles.division import GRPO, SMALL, VLLM, named, typed
from conformance.doubles.instance import free_port
from conformance.doubles.one_step import take_steps
from conformance.doubles.started import finish, started
from conformance.doubles.swift_rlhf import STEPS, check_steps
from conformance.gpu.peers import greedy_answers_of_transformers, our_server
from conformance.gpu.places import gpu_of, place, put_at
from conformance.gpu.trl_trainer import MODEL, greedy_answers
from conformance.tools.outside_tools import python_of

SWIFT = (
    "custom.extra.rollout_server.engine=swift",
    "custom.extra.swift.model_type=qwen3_vl",
    "custom.extra.swift.template=qwen3_vl",
    "custom.extra.rollout_server.vllm_gpu_memory_utilization=0.1",
    f"{VLLM}.enforce_eager=true",
)
COMMANDS = """
import json, sys
from pathlib import Path
from swift.pipelines import rlhf_main, rollout_main

def learn():
    # Its template for Qwen3-VL counts pictures by the id of Qwen's own vocabulary; that of a small model is another.
    from swift.template.templates.qwen import Qwen3VLTemplate
    config = Path(sys.argv[sys.argv.index("--model") + 1], "config.json")
    Qwen3VLTemplate.image_token_id = json.loads(config.read_text())["image_token_id"]
    rlhf_main()

if __name__ == "__main__":
    {"rollout": rollout_main, "rlhf": learn}[sys.argv.pop(1)]()
"""


@pytest.fixture
def swift_command(tmp_path, monkeypatch):
    """``swift`` on the path."""
    script, command = tmp_path / "swift_commands.py", tmp_path / "bin/swift"
    script.write_text(COMMANDS)
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{python_of("swift")}" "{script}" "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.gpu(1)
@pytest.mark.swift
@pytest.mark.usefixtures("swift_command")
def test_swift_s_server_answers_by_the_weights_of_every_step(tmp_path, monkeypatch):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    own = (f"{VLLM}.mode=server", f"{VLLM}.server.base_url={url}", f"{VLLM}.server.group_port={free_port()}")
    with started(typed("serve", CONFIG, "0", (*own, *SWIFT)), tmp_path / "server.txt", **place(0)) as server:
        server.wait_healthy(url)
        put_at(1, tmp_path, monkeypatch)
        try:
            take_steps(CONFIG, url, tmp_path, *SWIFT, num_steps=3)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{server.output()[-3000:]}") from error


@pytest.mark.gpu(1)
@pytest.mark.swift
@pytest.mark.usefixtures("swift_command")
def test_swift_s_learner_trains_with_our_server_on_gpus(tmp_path):
    out, port = tmp_path / "run", free_port()
    overrides = (
        *(*named(GRPO, port, free_port()), *SMALL, f"training.output_dir={out}", f"training.max_steps={STEPS}"),
        *("custom.extra.grpo.num_generations=4", "training.learning_rate=0.01", "training.warmup_steps=0"),
        *(f"{VLLM}.enforce_eager=true", f"{VLLM}.kv_cache_memory_mib=1024"),
    )
    learner = typed("train", GRPO, gpu_of(1), overrides, "--engine", "swift", "--wait-timeout", "200")
    with started(typed("serve", GRPO, "0", overrides), tmp_path / "server.txt", **place(0)) as server:
        server.wait_healthy(f"http://127.0.0.1:{port}")
        code, output = finish(learner, tmp_path / "learner.txt", **place(1))
        assert code == 0, output[-3000:] + server.output()[-3000:]
        health = requests.get(f"http://127.0.0.1:{port}/health/", timeout=10).json()
    assert health["policy_version"] == STEPS
    check_steps(out)


SEND = """
import sys
from transformers import AutoModelForCausalLM
from verifiers.rl.inference.client import VLLMClient

port, group_port, directory = sys.argv[1:]
client = VLLMClient(host="127.0.0.1", port=int(port), group_port=int(group_port))
client.init_communicator()
for name, weight in AutoModelForCausalLM.from_pretrained(directory).cuda().named_parameters():
    client.update_named_param(name, weight.data)
client.reset_prefix_cache()
client.close_communicator()
"""


@pytest.mark.gpu(1)
@pytest.mark.verifiers
def test_our_server_answers_by_the_weights_of_verifiers_client(tmp_path):
    port, group_port = free_port(), free_port()
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=chance))
    changed = tmp_path / "changed"
    model.save_pretrained(changed)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(changed)
    with started(our_server(port), tmp_path / "server.txt", **place(0)) as server:
        server.wait_healthy(f"http://127.0.0.1:{port}")
        assert greedy_answers(f"http://127.0.0.1:{port}") == greedy_answers_of_transformers(MODEL)
        sent = [python_of("verifiers"), "-c", SEND, str(port), str(group_port), str(changed)]
        code = subprocess.run(sent, env=os.environ | place(1), timeout=200, capture_output=True, text=True)
        assert code.returncode == 0, code.stderr[-3000:] + server.output()[-3000:]
        answered = greedy_answers(f"http://127.0.0.1:{port}")
    assert answered == greedy_answers_of_transformers(changed) != greedy_answers_of_transformers(MODEL)
