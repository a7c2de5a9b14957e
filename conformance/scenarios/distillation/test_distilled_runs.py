"""Whole runs of distillation beside the oracle's: ranks, adapters, packing, ahead, averages, given answers, resume."""

import json

import pytest

from conformance.draws.compare import judge
from conformance.draws.strategy import PLAIN
from conformance.oracle.defaults import D, G, R, T

DIVERGENCE = {f"{D}.loss": "divergence", f"{D}.beta": 0.3, f"{D}.top_k": 4}
KEYS = PLAIN | {
    "custom.trainer_variant": "distill",
    f"{G}.rewards": [],
    f"{G}.num_generations": 1,
    f"{R}.rollout_backend": "vllm",
    f"{T}.max_steps": 4,
    f"{T}.per_device_train_batch_size": 2,
    f"{T}.eval_scenes": 1,
    f"{T}.learning_rate": 0.003,
    f"{T}.optim": "sgd",
}
PACKED = {f"{T}.packing": True, "model.attn_impl": "packed"}
LORA = {
    "tuner.train_type": "lora",
    "tuner.lora_rank": 2,
    "tuner.target_regex": ".*layers.0.*(q|down)_proj",
    f"{T}.warmup_steps": 1,
    f"{T}.learning_rate": 0.1,
}
BEFORE = [{"prompt": "{question}{a}", "weight": 2.0}]
ITSELF = [{"self": True, "prompt": "{a}{question}"}]
AVERAGE = [{"self": True, "prompt": "{question}{a}", "average": 0.5}]
BY_KIND = [{"when": {"kind": 1}}, *ITSELF]
RUNS = {
    "ranks-lora-packed": ({"ranks": 2, "servers": [{}, {}]}, PACKED | LORA | DIVERGENCE, BY_KIND),
    "ahead-sampled": ({"servers": [{}, {}]}, {f"{R}.overlap": "ahead", f"{R}.max_staleness": 1}, ITSELF),
    "resumed-lora-average": ({"servers": [{}], "resume": 2}, LORA | DIVERGENCE, AVERAGE),
    "given-resumed": (
        {"servers": [{}], "resume": 2},
        DIVERGENCE | {f"{D}.lmbda": 0.5, f"{D}.answers": "{a}", f"{T}.seed": 3},
        BEFORE,
    ),
    "given-ranks-packed": (
        {"servers": [{}], "ranks": 2},
        PACKED | DIVERGENCE | {f"{D}.lmbda": 0.5, f"{D}.answers": "{a}", f"{T}.seed": 3},
        BEFORE,
    ),
}


@pytest.mark.slow
@pytest.mark.scenario(
    clauses=[
        "distillation/a-teacher-judges-the-policy-s-own-completions#1,2,3,4,5,6,7,8,9",
        "distillation/a-policy-may-be-taught-by-an-average-of-itself#1,2",
        "distillation/some-steps-may-learn-from-answers-of-the-data-set#1,2,3",
        "distillation/what-a-policy-has-of-its-teacher-is-shown#1",
    ]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.wide] if "ranks-lora" in name else []) for name in RUNS]
)
def test_a_run_agrees_with_the_oracle(tmp_path, name):
    """Requests, figures, gradients; and after a resume the weights, bit for bit."""
    fields, keys, teachers = RUNS[name]
    samples = [{"prompt": f"{i}a", "metadata": {"a": ("1", " b.")[i % 2], "kind": i % 2}} for i in range(7)]
    draw = {"family": "qwen3", "samples": samples, "keys": KEYS | keys | {f"{D}.teachers": teachers}} | fields
    judge(draw, tmp_path / "draw", tmp_path / "models")
    events = [json.loads(line) for line in (tmp_path / "draw/run/journal.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events if event.get("purpose", "train") == "train"]
    assert "generated" in kinds
    assert ("given" in kinds) == ("given" in name)
