"""Our learner and the unmodified ``swift rollout``, started by our command, from one YAML.

On a machine without GPUs the plug-in of ``conformance/servers/plugged`` lets ms-swift's server take weights over gloo.
"""

import json
from pathlib import Path

import pytest

from conformance.cli.division import typed
from conformance.cli.started import finish, journal_of, started, train_command
from conformance.cli.swift_command import put_on_the_path
from conformance.harness.judge import judge
from conformance.rollout.digits import CONFIG, GREEDY, requests_for, scenes, template_of
from conformance.server.instance import free_port
from rollmatch.config.training import ModelConfig, TunerConfig
from rollmatch.model.policy import load_policy
from rollmatch.rollout.hf import HfBackend

pytestmark = [pytest.mark.swift, pytest.mark.engine]

VLLM, SERVER, SWIFT = (f"custom.extra.{name}" for name in ("rollout_matching.vllm", "rollout_server", "swift"))
SCENES, STEPS = 4, 2


def overrides_for(out: Path) -> list[str]:
    return [
        f"{VLLM}.mode=server",
        f"{VLLM}.server.base_url=http://127.0.0.1:{free_port()}",
        f"{VLLM}.server.group_port={free_port()}",
        f"{VLLM}.server.timeout_s=150",
        f"{VLLM}.kv_cache_memory_mib=64",
        f"{SERVER}.engine=swift",
        f"{SWIFT}.model_type=qwen3_vl",
        f"{SWIFT}.template=qwen3_vl",
        f"training.output_dir={out}",
        f"training.max_steps={STEPS}",
        "training.per_device_train_batch_size=4",
        "training.learning_rate=1e-3",
        "training.save_steps=1000",
        f"training.eval_scenes={SCENES}",
        "training.report_to=none",
    ]


def serve_command(overrides: list[str]) -> list[str]:
    return typed("serve", CONFIG, "0", overrides)


def answers_told(evaluation: Path) -> list[str]:
    return [scene["response_text"] for scene in json.loads(evaluation.read_text())["scenes"]]


def answers_of_checkpoint(directory: Path) -> list[str]:
    """What transformers answers by the weights that were saved."""
    template = template_of()
    model = load_policy(
        ModelConfig(model=str(directory), torch_dtype="float32"), TunerConfig(), attn_implementation="sdpa"
    )
    rollouts = HfBackend(model.eval(), template, batch_size=SCENES).generate(
        requests_for(scenes()[:SCENES], template=template), GREEDY
    )
    return [template.vocabulary.text(rollout.response_token_ids) for rollout in rollouts]


def test_our_learner_trains_with_swift_s_own_server(tmp_path, monkeypatch):
    put_on_the_path(tmp_path, monkeypatch)
    out = tmp_path / "run"
    overrides = overrides_for(out)
    with started(serve_command(overrides), tmp_path / "server.txt") as server:
        code, told = finish(train_command(*overrides, flags=("--wait-timeout", "200")), tmp_path / "learner.txt")
        assert code == 0, told[-3000:] + server.told()[-3000:]
    events = journal_of(out, None)
    assert judge(sorted(events, key=lambda event: event["time"])) == []
    assert [event["version"] for event in events if event["event"] == "synced"] == list(range(1, STEPS + 2))
    first, last = (answers_told(out / f"evaluations/step-00000{step}.json") for step in (0, STEPS))
    assert first != last, "training changed what is answered, so that a server with old weights would be found out"
    assert last == answers_of_checkpoint(out / f"checkpoint-{STEPS}")
