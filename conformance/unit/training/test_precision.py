"""Full fine-tuning with bfloat16 compute keeps float32 weights and optimizer state."""

import pytest
import torch

from conformance.doubles.digits import load_digits
from conformance.doubles.refusals import refused
from conformance.doubles.small_run import make_trainer
from rollmatch.config import effective


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_full_fine_tuning_in_bfloat16_changes_nearly_all_weights(tmp_path, dtype):
    """Four steps of AdamW at 1e-5. Of weights that are themselves in bfloat16, 5 % would change."""
    adam = ("training.optim=adamw_torch", "training.learning_rate=1e-5", "training.max_steps=4")
    overrides = (f"model.torch_dtype={dtype}", "training.bf16=true", "training.per_device_train_batch_size=2", *adam)
    trainer = make_trainer(tmp_path, *overrides)
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    after, states = dict(trainer.model.named_parameters()), trainer.optimizer.state.values()
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    assert {state[name].dtype for state in states for name in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    changed = sum(int((after[name] != weight).sum()) for name, weight in before.items())
    assert changed > 0.99 * sum(weight.numel() for weight in before.values())


def test_training_half_weights_by_adam_is_refused_unless_allowed():
    half, adam = "model.torch_dtype=bfloat16", "training.optim=adamw_torch"
    with refused("half-weights", "model.torch_dtype"):
        load_digits(half, adam)
    others = (adam, "training.allow_half_weights=true"), (adam, "training.bf16=true"), (adam, "tuner.train_type=lora")
    dtypes = [effective.learner_dtype(load_digits(half, *each)) for each in (*others, ("training.optim=sgd",))]
    assert dtypes == ["bfloat16", "float32", "bfloat16", "bfloat16"]
