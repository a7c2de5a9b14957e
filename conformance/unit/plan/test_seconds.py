"""Seconds that a split adds to a step, by hand on round numbers: passes, exchanges, syncs and overlap."""

import pytest

from conformance.doubles.forecasts import ROUND, RULES, split
from rollmatch.plan.memory import learning_weights
from rollmatch.plan.rates import Rates

WEIGHTS, LINK, BETWEEN = 8.19e9, 1e11, 1e10
FULL, ENGINE_WITH_LORA = "tuner.train_type=full", f"{RULES}.vllm.enable_lora=true"
IN_PLACE = "training.gradient_checkpointing=false"


@pytest.fixture
def rounded(forecaster):
    return lambda *overrides, **fields: forecaster(*overrides, rates=Rates.model_validate(ROUND), gpu="G", **fields)


def exchange_s(one):
    return one.forecast(split(2, 2)).learn_s - one.forecast(split(2, 1)).learn_s


def test_gradients_go_around_once_and_split_weights_are_gathered_twice_a_micro_batch(rounded):
    lora = rounded()
    adapters = learning_weights(lora.config, lora.shape)
    assert exchange_s(lora) == pytest.approx(2 * 4 * adapters / LINK)
    assert exchange_s(rounded(num_nodes=2, num_gpus=2)) == pytest.approx(2 * 4 * adapters / BETWEEN)
    full = 2 * 2 * WEIGHTS / LINK
    assert exchange_s(rounded(FULL)) == pytest.approx(full, rel=1e-3)
    gathered = 4 * 2 * 2 * WEIGHTS / LINK
    assert exchange_s(rounded(FULL, "training.strategy=fsdp2")) == pytest.approx(full + gathered, rel=1e-3)


def test_full_fine_tuning_and_activations_that_are_computed_again_take_a_pass_more_each(rounded):
    kept, again, full = (
        rounded(*overrides).forecast(split(3, 1)).learn_s for overrides in ((IN_PLACE,), (), (FULL, IN_PLACE))
    )
    one_pass = 64 * 2500 * (2 * 6.946e9 + 2 * 2500 * 36 * 32 * 128) / 5e14
    assert again - kept == pytest.approx(one_pass, rel=1e-3)
    assert full - kept == pytest.approx(one_pass, rel=1e-3)


def test_what_a_sync_carries(rounded):
    merge = 2 * 2 * WEIGHTS / 1e12
    adapter = rounded(f"{RULES}.vllm.sync.mode=auto", ENGINE_WITH_LORA)
    carried = 4 * learning_weights(adapter.config, adapter.shape) / LINK
    assert adapter.forecast(split(3, 1)).sync_s == pytest.approx(0.05 + merge + carried, rel=1e-3)
    beside = rounded(f"{RULES}.vllm.mode=colocate").forecast(split(4, 4, is_colocated=True))
    assert beside.sync_s == pytest.approx(0.05 + 2 * merge, rel=1e-3)
