"""Optimizer steps of our learner on servers of other projects: TRL's, on text, and ``swift rollout``, by our command.

``test_engine_stock`` takes them on ``vllm serve``. On a machine without GPUs the plug-ins of
``conformance/judge/servers/plugged`` and ours let these servers take weights over gloo.
"""

from contextlib import contextmanager
from pathlib import Path

import pytest

from conformance.doubles.adapted_policy import LANGUAGE, check_adapters_alone
from conformance.doubles.digits import CONFIG, ROOT, requests_for, scenes
from conformance.doubles.division import VLLM, typed
from conformance.doubles.instance import free_port
from conformance.doubles.learner_side import connected
from conformance.doubles.one_step import take_steps
from conformance.doubles.started import started
from conformance.doubles.swift_parser import put_on_the_path
from conformance.judge.servers.known import BY_NAME
from conformance.tools.outside_tools import python_of, trl_command

pytestmark = pytest.mark.engine
ARITHMETIC = ROOT / "fixtures/arithmetic/grpo.yaml"
SWIFT = (
    "custom.extra.rollout_server.engine=swift",
    "custom.extra.swift.model_type=qwen3_vl",
    "custom.extra.swift.template=qwen3_vl",
    f"{VLLM}.kv_cache_memory_mib=64",
)


@pytest.mark.trl
def test_a_step_on_text_with_trl_s_own_server(tmp_path):
    port = free_port()
    options = ["--model", str(ROOT / "fixtures/models/arithmetic"), "--dtype", "float32", "--host", "127.0.0.1"]
    options += ["--port", str(port), "--max_model_len", "64", "--enforce_eager", "true"]
    variables = [f"{name}={value}" for name, value in BY_NAME["trl"].variables().items()]
    words = ["env", "-u", "VLLM_ENABLE_V1_MULTIPROCESSING", *variables, trl_command(), "vllm-serve", *options]
    with started(words, tmp_path / "server.txt"):
        take_steps(ARITHMETIC, f"http://127.0.0.1:{port}", tmp_path, "custom.extra.grpo.eval_temperature=0")


@pytest.mark.swift
def test_our_learner_trains_with_swift_s_own_server(tmp_path, monkeypatch):
    put_on_the_path(tmp_path, monkeypatch)
    url = f"http://127.0.0.1:{free_port()}"
    named = (f"{VLLM}.mode=server", f"{VLLM}.server.base_url={url}", f"{VLLM}.server.group_port={free_port()}")
    with started(typed("serve", CONFIG, "0", (*named, *SWIFT)), tmp_path / "server.txt"):
        take_steps(CONFIG, url, tmp_path, *SWIFT, num_steps=2)


@pytest.mark.swift
def test_our_learner_trains_swift_s_own_server_by_adapters_alone(tmp_path):
    with swift_server_for_adapters(tmp_path / "server.txt") as url:
        adapters = (f"{VLLM}.sync.mode=adapter", f"{VLLM}.enable_lora=true", "tuner.train_type=lora")
        language = f"tuner.target_regex={LANGUAGE}"
        take_steps(CONFIG, url, tmp_path, *SWIFT, *adapters, language, num_steps=2, first_version=2)


@pytest.mark.swift
def test_an_adapter_alone_reaches_swift_s_own_server(tmp_path):
    with swift_server_for_adapters(tmp_path / "server.txt") as url:
        check_adapters_alone(connected(url, timeout_s=150), requests_for(scenes()[:8]))


@contextmanager
def swift_server_for_adapters(log):
    """Its URL, while it runs."""
    known, port = BY_NAME["ms-swift"], free_port()
    flags = ["--vllm_enable_lora", "true", "--vllm_max_lora_rank", "16"]
    variables = [f"{name}={value}" for name, value in known.variables().items()]
    words = [
        "env",
        "-u",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        *variables,
        *known.command(Path(python_of("swift")), port),
        *flags,
    ]
    with started(words, log):
        yield f"http://127.0.0.1:{port}"
