"""What a plan says that it took for granted, and what it lacks where nothing fits."""

import pytest

from conformance.doubles.refusals import refused
from rollmatch.plan.proposal import propose


def test_assumptions_say_what_was_not_measured_and_more_nodes(forecaster):
    assumptions = propose(forecaster(num_nodes=2)).assumptions
    assert any("more than one node" in line and "45 GB/s" in line for line in assumptions)
    assert any("1500 tokens of prompt, 1000 of response" in line for line in assumptions)
    shown = "\n".join(propose(forecaster()).assumptions)
    assert "more than one node" not in shown
    assert "12000 places, 97% of them tokens" in shown
    assert "2.5 GB beside the learner, 0.5 GB of logits, 4 GB beside an engine" in shown
    assert "a step taking 3 ms at least" in shown
    assert "plus 0.05 s" in shown
    padded = propose(forecaster("training.packing=false", "training.per_device_train_batch_size=1")).assumptions
    assert any("2500 places, 100% of them tokens" in line for line in padded)


@pytest.mark.parametrize(
    ("engines_per_server", "problem", "remedy"),
    [(2, "2v2: the learner lacks ", "Train adapters"), (3, "3v1: ranks and servers do not divide", "Give other GPUs")],
)
def test_the_last_split_that_goes_on_the_nodes_is_named_with_what_it_lacks(
    forecaster,
    engines_per_server,
    problem,
    remedy,
):
    full = ("tuner.train_type=full", "model.torch_dtype=float32", "training.gradient_checkpointing=false")
    made = forecaster(*full, num_gpus=2, num_nodes=2, engines_per_server=engines_per_server)
    with refused("nothing-fits", "--hosts", problem=problem, remedy=remedy):
        propose(made, key="--hosts")
