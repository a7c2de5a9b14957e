"""Capability ``grpo-server-mode``: how GRPO names its server, and that server's settings."""

import dataclasses
import json
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from conformance.doubles.adapters import adapted
from conformance.doubles.configs import GRPO, LONG, config_with, refusal_of
from conformance.doubles.digits import MODEL, load_model, template_of
from conformance.doubles.engine import install
from conformance.doubles.instance import free_port
from conformance.doubles.native_double import NativeDouble, serving
from conformance.doubles.refusals import refused
from rollmatch.config import RunConfig
from rollmatch.config.servers import server_section
from rollmatch.journal import Journal
from rollmatch.launch.rollout_server import make_settings
from rollmatch.model.checkpoint import merged_weights
from rollmatch.ranks import Ranks
from rollmatch.run.assemble import make_backend
from rollmatch.run.server_checks import WaitPolicy, wait_for_servers

SERVER_MODE = (*GRPO, "rlhf.use_vllm=true", "rlhf.vllm_mode=server")
HOST, PORT = 'rlhf.vllm_server_host=["127.0.0.1"]', "rlhf.vllm_server_port=[8080]"
NAMED = (*SERVER_MODE, HOST, PORT)
LAUNCHED = "custom.extra.rollout_server."
ALONE = Ranks(rank=0, learner_world_size=1)


def settings_of(*overrides: str) -> dict:
    """What the server launcher would pass to our own server."""
    return dataclasses.asdict(make_settings(config_with(*NAMED, *overrides), port=8080, replicas=1, on_gpu=True))


def launch_refusal(*overrides: str) -> tuple[str, str]:
    code, key = refusal_of(*NAMED, *overrides)
    return code, key.removeprefix(LAUNCHED)


def job(url: str, *, group_port: int, out: str = "runs/one") -> RunConfig:
    """A GRPO job whose server answers at ``url``."""
    port = url.rpartition(":")[2]
    return config_with(
        *NAMED,
        f"rlhf.vllm_server_port=[{port}]",
        f"rlhf.vllm_server_group_port={group_port}",
        f"model.model={MODEL}",
        f"training.output_dir={out}",
        "rlhf.vllm_server_timeout=5",
    )


@contextmanager
def connected(config: RunConfig):
    journal = Journal(Path(config.training.output_dir) / "journal.jsonl")
    backend = make_backend(config, torch.nn.Linear(1, 1, bias=False), template_of(), ranks=ALONE, journal=journal)
    try:
        yield backend
    finally:
        backend.close()
        journal.close()


@pytest.mark.scenario(clauses=["grpo-server-mode/grpo-names-its-server-by-lists-of-hosts-and-ports#1"])
def test_grpo_takes_its_rollouts_from_the_named_server(tmp_path, monkeypatch):
    install(load_model(), template_of(), monkeypatch)  # an engine beside it would be found, and need not be a real one
    with (
        serving(NativeDouble({"weight": torch.zeros(1, 1)})) as (url,),
        connected(job(url, group_port=1, out=tmp_path)) as backend,
    ):
        assert [server.base_url for server in getattr(backend, "servers", ())] == [url]


@pytest.mark.scenario(clauses=["grpo-server-mode/grpo-names-its-server-by-lists-of-hosts-and-ports#4"])
def test_the_wait_for_the_server_is_limited():
    assert server_section(config_with(*NAMED)).timeout_s == 240
    nobody = f"rlhf.vllm_server_port=[{free_port()}]"
    config = config_with(*NAMED, nobody, "rlhf.vllm_server_timeout=1", "~.vllm.server.timeout_s=7")
    began = time.monotonic()
    with refused("server-unreachable"):
        wait_for_servers(config, WaitPolicy())
    assert 0.9 <= time.monotonic() - began <= 5


@pytest.mark.scenario(clauses=["grpo-server-mode/the-rollout-server-of-grpo-has-a-section-of-its-own#3"])
def test_the_share_of_memory_is_above_0_and_at_most_1():
    for share in ("0", "1.1"):
        key = "vllm_gpu_memory_utilization"
        assert launch_refusal(f"{LAUNCHED}{key}={share}") == ("out-of-range", key)
    assert settings_of()["engine_arguments"]["gpu_memory_utilization"] == 0.6
    settings = settings_of(f"{LAUNCHED}vllm_gpu_memory_utilization=1.0")
    assert settings["engine_arguments"]["gpu_memory_utilization"] == 1.0


@pytest.mark.scenario(clauses=["grpo-server-mode/the-rollout-server-of-grpo-has-a-section-of-its-own#1"])
def test_settings_of_the_server_stand_in_its_section():
    settings = settings_of(
        f"{LAUNCHED}vllm_tensor_parallel_size=2",
        f"{LAUNCHED}vllm_max_model_len=2048",
        f"{LAUNCHED}vllm_engine_kwargs={json.dumps({'block_size': 32})}",
    )
    assert (settings["tensor_parallel_size"], settings["max_model_len"]) == (2, 2048)
    assert settings["engine_arguments"]["block_size"] == 32
    assert settings_of()["max_model_len"] == 1024, "that of the longest segment by default"


@pytest.mark.scenario(clauses=["grpo-server-mode/grpo-syncs-merged-weights-only#3"])
def test_adapters_on_all_three_parts_are_merged_into_what_is_sent():
    policy = adapted(use_dora=True)
    plain = {name: weight for name, weight in policy.get_base_model().named_parameters() if "lora" not in name}
    sent = dict(merged_weights(policy))
    assert not [name for name in sent if "lora" in name or "base_layer" in name]
    for part in (
        "language_model.layers.0.self_attn.q_proj",
        "visual.blocks.0.mlp.linear_fc1",
        "visual.merger.linear_fc1",
    ):
        assert not torch.equal(sent[f"model.{part}.weight"], plain[f"model.{part}.base_layer.weight"]), part
    lora = ("tuner.train_type=lora", "~.vllm.enable_lora=true")
    refusal = refusal_of(*NAMED, *lora, "~.vllm.sync.mode=adapter")
    assert refusal == ("adapter-sync-in-grpo", f"{LONG}vllm.sync.mode")
    config_with(*NAMED, *lora, "~.vllm.sync.mode=full")


@pytest.mark.scenario(
    "grpo-server-mode/a-taken-group-port-is-reported-as-such-not-as-a-server-port",
    clauses=["grpo-server-mode/two-jobs-can-share-a-machine#2"],
)
def test_a_taken_group_port_is_reported_apart_from_a_taken_server_port(tmp_path):
    taken, weights = free_port(), {"weight": torch.zeros(1, 1)}
    out, other = tmp_path / "first", tmp_path / "second"
    with serving(NativeDouble(weights), NativeDouble(weights)) as (first_url, second_url), ExitStack() as jobs:
        jobs.enter_context(connected(job(first_url, group_port=taken, out=out))).push(weights.items(), version=1)
        second = jobs.enter_context(connected(job(second_url, group_port=taken, out=other)))
        with refused("group-port-in-use", problem=str(taken)) as caught:
            second.push(weights.items(), version=1)
        assert second_url.rpartition(":")[2] not in caught.value.problem
        elsewhere = jobs.enter_context(connected(job(second_url, group_port=free_port(), out=other)))
        elsewhere.push(weights.items(), version=1)
        assert elsewhere.policy_version == 1
