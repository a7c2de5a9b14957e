"""Runs whose policy FSDP2 splits over two ranks, beside the same runs under DDP: episodes of GRPO and VinePPO."""

import json
import sys

import pytest
from safetensors.torch import load_file

from conformance.doubles.refusals import refused
from conformance.doubles.small_run import make_trainer
from conformance.doubles.started import finish_ranks

WORKER = ("-m", "conformance.doubles.ddp_worker")
ADAPTERS = ("tuner.train_type=lora", "tuner.lora_rank=2", "training.gradient_checkpointing=true")
TWO = ("training.per_device_train_batch_size=1", "training.max_steps=2", "training.save_steps=1000")
TOLERANCE = 1e-4
"""Relative: float32, and sums over ranks in another order."""
RUNS = {
    "grpo-adapters": (*ADAPTERS, "custom.trainer_variant=grpo", "custom.extra.grpo.beta=0.1"),
    "vineppo": (),
}


def losses_of(folder):
    return [json.loads((folder / f"rank{rank}.json").read_text())["losses"] for rank in (0, 1)]


@pytest.mark.scenario(
    "learner-ranks/split-weights-learn-what-whole-ones-learn",
    clauses=["learner-ranks/the-policy-is-shared-as-configured-or-not-at-all#4"],
)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo-adapters", pytest.param("vineppo", marks=pytest.mark.wide)])
def test_split_weights_learn_what_whole_ones_learn(name, tmp_path):
    for strategy in ("ddp", "fsdp2"):
        (tmp_path / strategy).mkdir()
        words = ("episodes", str(tmp_path / strategy), *TWO, *RUNS[name], f"training.strategy={strategy}")
        finish_ranks(tmp_path / strategy, 2, sys.executable, *WORKER, *words)
    for split, whole in zip(*(losses_of(tmp_path / strategy) for strategy in ("fsdp2", "ddp")), strict=True):
        assert split == pytest.approx(whole, rel=TOLERANCE, abs=1e-6)
    split, whole = (load_file(tmp_path / strategy / "rank0.safetensors") for strategy in ("fsdp2", "ddp"))
    assert split.keys() == whole.keys()
    for weight, expected in ((split[key], whole[key]) for key in whole):
        assert (weight - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.scenario(
    "learner-ranks/a-strategy-that-does-not-engage-is-refused",
    clauses=["learner-ranks/the-policy-is-shared-as-configured-or-not-at-all#5"],
)
@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_a_strategy_that_accelerate_leaves_out_is_refused(engine, tmp_path):
    trainer = make_trainer(tmp_path)
    setattr(trainer.args, engine, {"zero_optimization": {"stage": 2}})
    with refused("strategy-not-engaged", key="training.strategy"):
        trainer.evaluate()
