"""Commands of servers that others made, on this machine's GPUs, and what they should answer."""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conformance.doubles.digits import ROOT
from conformance.doubles.division import VLLM, typed
from conformance.doubles.instance import free_port
from conformance.gpu.trl_trainer import MAX_TOKENS, MODEL, NUM_PROMPTS, prompts

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


def greedy_answers_of_transformers(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).cuda().eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    answers = []
    for prompt in prompts()[:NUM_PROMPTS]:
        ids = tokenizer(prompt, return_tensors="pt").to("cuda")
        whole = model.generate(**ids, do_sample=False, max_new_tokens=MAX_TOKENS)
        answers.append(whole[0, ids["input_ids"].shape[1] :].tolist())
    return answers


SERVER = "custom.extra.rollout_server"


def server_overrides(ports, groups, **sizes):
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    named = (
        {"base_url": urls, "group_port": groups} if len(ports) > 1 else {"base_url": urls[0], "group_port": groups[0]}
    )
    return (
        f"{VLLM}.mode=server",
        *(f"{VLLM}.server.{key}={value}".replace("'", "") for key, value in named.items()),
        *(f"{SERVER}.vllm_{name}_parallel_size={size}" for name, size in sizes.items()),
    )
