"""Unmodified trainers of TRL and verifiers train with our server, over gloo: it then holds what they have learned.

TRL up to 1.10 speaks the trl dialect, and newer ones speak to our server as to a stock ``vllm serve``. verifiers 0.1.9
samples by the OpenAI routes, and sends weights as TRL up to 1.10 does.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM

from conformance.doubles.digits import ROOT
from conformance.doubles.instance import free_port, running
from conformance.tools.outside_tools import python_of, trl_command, trl_python

pytestmark = pytest.mark.engine
MODEL, PLUGGED = ROOT / "fixtures/models/arithmetic", ROOT / "conformance/judge/servers/plugged"
NUM_STEPS, TIMEOUT_S = 3, 400
OF_VERIFIERS = """
import sys
from verifiers_on_a_cpu import train
url, port, model, steps, out = sys.argv[1:]
trainer = train(url, int(port), model, int(steps), out)
trainer.update_vllm()
trainer.save_model(out)
"""
OF_TRL = """
import sys
import trl_on_a_cpu
trl_on_a_cpu.stand_in_for_nccl()
from trl import GRPOTrainer
url, port, model, steps, out = sys.argv[1:]
train = GRPOTrainer.train

def train_and_save(trainer):
    train(trainer)
    trainer.vllm_generation.sync_weights()
    trainer.save_model(out)

GRPOTrainer.train = train_and_save
trl_on_a_cpu.train(url, int(port), model, int(steps), out)
"""

IMAGES = """
import json, sys
from PIL import Image
from trl.generation.vllm_client import VLLMClient
url, path, prompt = sys.argv[1:]
client = VLLMClient(base_url=url)
seen, unseen = client.image_features([[Image.open(path)], None])
assert unseen is None
prompts = [json.loads(prompt), [5, 6]]
print(json.dumps(client.generate(prompts, features=[seen, unseen], n=2, temperature=0.0, max_tokens=6, logprobs=0)))
"""


def greedy(url, prompt):
    body = {"prompts": [prompt], "max_tokens": 8, "temperature": 0.0, "generation_kwargs": {"ignore_eos": True}}
    reply = requests.post(f"{url}/generate/", json=body, timeout=60)
    answered = reply.json()
    values = [value for (value,) in answered["logprobs"][0]]
    return answered["completion_ids"][0], torch.tensor(values), int(reply.headers["x-policy-version"])


@torch.no_grad()
def logprobs_of(model, prompt, ids):
    rows = model(torch.tensor([[*prompt, *ids]])).logits.log_softmax(-1)[0]
    return torch.stack([rows[len(prompt) - 1 + place, token_id] for place, token_id in enumerate(ids)])


def train(python, script, url, out):
    paths = os.pathsep.join([str(PLUGGED), os.environ.get("PYTHONPATH", "")])
    command = [str(python), "-c", script, url, str(free_port()), str(MODEL), str(NUM_STEPS), str(out)]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ran.returncode == 0, ran.stderr[-3000:]


def check_what_was_learned(python, folder, script=OF_TRL):
    out = folder / "out"
    with running(folder / "log", fork=False, model=str(MODEL), max_model_len=64) as server:
        train(python, script, server.url, out)
        learned, first = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (out, MODEL))
        for prompt in ([5, 6, 7], [8, 9], [10, 11, 12, 13]):
            ids, values, version = greedy(server.url, prompt)
            assert version >= NUM_STEPS
            assert torch.allclose(values, logprobs_of(learned, prompt, ids), atol=1e-3)
            assert not torch.allclose(values, logprobs_of(first, prompt, ids), atol=1e-2)


@pytest.mark.trl
def test_the_server_holds_what_trl_s_trainer_has_learned(tmp_path: Path):
    check_what_was_learned(Path(trl_command()).parent / "python", tmp_path)


@pytest.mark.trl_new
@pytest.mark.scenario("server-dialects/a-trainer-of-stock-servers-trains-with-ours")
def test_the_server_holds_what_a_newer_trainer_of_trl_has_learned(tmp_path: Path):
    check_what_was_learned(trl_python(), tmp_path)


@pytest.mark.verifiers_rl
def test_the_server_holds_what_verifiers_trainer_has_learned(tmp_path: Path):
    check_what_was_learned(python_of("verifiers_rl"), tmp_path, OF_VERIFIERS)


@pytest.mark.trl_new
def test_images_of_its_client_are_seen(instance, scene_requests, tmp_path: Path):
    """TRL sends images alone, and then what the server made of them beside the expanded prompt."""
    (request, *_), python = scene_requests, trl_python()
    (path,) = request.sample.images
    sampling = {"max_tokens": 6, "temperature": 0.0, "logprobs": True}
    prompts = [
        {"prompt_token_ids": list(request.prompt_token_ids), "images": [str(path)]},
        {"prompt_token_ids": [5, 6]},
    ]
    requests_ = [{"request_id": str(item), **prompt} for item, prompt in enumerate(prompts)]
    _, native = instance.server.post("/native/infer/", {"requests": requests_, "sampling": sampling})
    expected = native["responses"]
    command = [python, "-c", IMAGES, instance.url, str(path), json.dumps(expected[0]["prompt_token_ids"])]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ran.returncode == 0, ran.stderr[-3000:]
    answered = json.loads(ran.stdout.splitlines()[-1])
    assert answered["prompt_ids"] == [one["prompt_token_ids"] for one in expected]
    ids = [row for one in expected for row in [one["response_token_ids"]] * 2]
    assert answered["completion_ids"] == ids
    values = [[value for (value,) in row] for row in answered["logprobs"]]
    for row, one in zip(values[::2], expected):
        assert row == pytest.approx(one["logprobs"], abs=1e-4)
