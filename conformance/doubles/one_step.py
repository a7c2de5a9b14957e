"""Optimizer steps of our learner on a server that it did not start, and what the server answers after each."""

import json
import sys
from pathlib import Path

from conformance.doubles.digits import CONFIG, absolute
from conformance.doubles.instance import free_port
from conformance.doubles.started import finish, in_time, journal_of
from conformance.tools.judge import judge
from rollmatch.config import load_config
from rollmatch.config.training import TunerConfig
from rollmatch.model.policy import load_policy
from rollmatch.model.source import with_local_model
from rollmatch.rollout.backend import Decoding, make_requests
from rollmatch.rollout.hf import HfBackend
from rollmatch.run.assemble import make_template
from rollmatch.run.machine import has_gpu
from rollmatch.run.preflight import load_checked

VLLM = "custom.extra.rollout_matching.vllm"
NUM_SAMPLES = 8


def overrides_for(url: str, out: Path) -> list[str]:
    return [
        f"{VLLM}.mode=server",
        f"{VLLM}.server.base_url={url}",
        f"{VLLM}.server.group_port={free_port()}",
        f"{VLLM}.server.timeout_s=150",
        f"training.output_dir={out}",
        "training.eval_steps=1",
        "training.per_device_train_batch_size=8",
        "training.learning_rate=2e-2",
        "training.warmup_steps=0",
        "training.save_steps=1",
        "training.save_total_limit=10",
        f"training.eval_scenes={NUM_SAMPLES}",
        "training.report_to=none",
    ]


def answers_in(evaluation: Path) -> list[str]:
    record = json.loads(evaluation.read_text())
    return [answer["response_text"] for answer in record["scenes"] or record["answers"]]


def answers_of_transformers(config: Path, model: Path, *limits: str) -> list[str]:
    """Greedily, by the weights in this directory."""
    given = absolute(f"model.model={model}") if config == CONFIG else [f"model.model={model}"]
    run = with_local_model(load_config(config, [*given, *limits]))
    template = make_template(run)
    samples = load_checked(run)[1][:NUM_SAMPLES]
    requests = make_requests(samples, prompt_of=template.prompt_token_ids, run_seed=run.training.seed, step=0, rank=0)
    policy = load_policy(run.model, TunerConfig(), attn_implementation="sdpa").eval()
    policy = policy.cuda() if has_gpu() else policy
    decoding = Decoding(max_new_tokens=run.custom.extra.rollout_matching.max_new_tokens)
    rollouts = HfBackend(policy, template, batch_size=NUM_SAMPLES).generate(requests, decoding)
    return [template.vocabulary.text(rollout.response_token_ids) for rollout in rollouts]


def take_steps(
    config: Path,
    url: str,
    folder: Path,
    *overrides: str,
    num_steps: int = 1,
    first_version: int = 1,
    limits: tuple[str, ...] = (),
) -> None:
    """Greedy answers of the server after each step are those of transformers with the checkpoint of that step.

    ``first_version``: of the first sync; noise that is sent before it to show an adapter has version 1. ``limits``:
    overrides that transformers obeys, too.
    """
    out = folder / "run"
    given = (*overrides_for(url, out), f"training.max_steps={num_steps}", *overrides, *limits)
    sets = [part for override in given for part in ("--set", override)]
    command = [sys.executable, "-m", "rollmatch", "train", str(config), *sets, "--wait-timeout", "300"]
    code, output = finish(command, folder / "learner.txt")
    assert code == 0, output[-3000:]
    events = journal_of(out, None)
    assert judge(in_time([events])) == []
    versions = [event["version"] for event in events if event["event"] == "synced"]
    assert versions == list(range(first_version, first_version + num_steps + 1))
    answered = [answers_in(out / f"evaluations/step-{step:06}.json") for step in range(num_steps + 1)]
    for step in range(1, num_steps + 1):
        assert answered[step] != answered[step - 1], "a server with old weights would be found out"
        assert answered[step] == answers_of_transformers(config, out / f"checkpoint-{step}", *limits)
