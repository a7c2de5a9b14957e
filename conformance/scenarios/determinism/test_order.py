"""The order of samples, and windows: what the data loader will bring, known beforehand."""

from collections import Counter
from itertools import chain, combinations

import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from conformance.doubles.records import make_sample
from conformance.doubles.refusals import refused
from rollmatch.data import LearnerOrder, ReusedOrder, StepShape, WindowPlan
from rollmatch.data.order import check_order

SEEDS = st.integers(0, 2**40)
EPOCHS = st.integers(0, 10_000)


def walk(num_samples, seed, epoch):
    order = LearnerOrder(num_samples, seed=seed)
    order.set_epoch(epoch)
    return list(order)


@pytest.mark.scenario(
    "determinism/another-seed-gives-another-order", clauses=["data-ownership/the-learner-owns-the-order-of-the-data#1"]
)
@given(epoch=EPOCHS, seeds=st.lists(SEEDS, min_size=2, max_size=2, unique=True))
def test_seeds_and_epochs_differ(epoch, seeds):
    orders = [walk(100, seeds[0], epoch), walk(100, seeds[1], epoch), walk(100, seeds[0], epoch + 1)]
    assert all(one != other for one, other in combinations(orders, 2))
    assert walk(100, 1, 2) != walk(100, 2, 1)


shapes = st.builds(
    StepShape,
    batch_size=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    learner_world_size=st.integers(1, 3),
    steps_per_generation=st.integers(1, 3),
    num_iterations=st.integers(1, 3),
)


def loaded(num_samples, shape, *, rank, epoch, seed=5):
    """What accelerate hands a rank in an epoch, an optimizer step each."""
    order = ReusedOrder(LearnerOrder(num_samples, seed=seed), shape)
    order.set_epoch(epoch)
    batches = BatchSampler(order, shape.batch_size, drop_last=False)
    if shape.learner_world_size > 1:
        batches = BatchSamplerShard(batches, num_processes=shape.learner_world_size, process_index=rank)
    mine = list(batches)
    return [
        tuple(chain(*mine[start : start + shape.accumulation])) for start in range(0, len(mine), shape.accumulation)
    ]


@given(num_samples=st.integers(1, 40), shape=shapes, epoch=st.integers(0, 2), data=st.data())
def test_a_window_names_what_the_loader_brings(num_samples, shape, epoch, data):
    rank = data.draw(st.integers(0, shape.learner_world_size - 1))
    plan = WindowPlan(num_samples, seed=5, shape=shape, rank=rank)
    steps = loaded(num_samples, shape, rank=rank, epoch=epoch)
    assert len(steps) == plan.steps_per_epoch
    for place, samples in enumerate(steps):
        step = epoch * plan.steps_per_epoch + place
        window = plan.at(step)
        assert window.epoch == epoch
        assert window.first_step <= step < window.end_step
        assert window.parts[window.part_of(step)] == samples


@pytest.mark.scenario(clauses=["grpo-server-mode/the-options-of-the-policy-gradient-are-checked#8"])
@given(num_samples=st.integers(1, 40), shape=shapes)
def test_windows_follow_one_another_without_gap(num_samples, shape):
    plan = WindowPlan(num_samples, seed=5, shape=shape, rank=0)
    step = 0
    while step < 2 * plan.steps_per_epoch:
        window = plan.at(step)
        assert window.first_step == step
        assert all(plan.at(other) == window for other in range(step, window.end_step))
        assert 1 <= len(window.parts) <= shape.steps_per_generation
        assert window.end_step - step == len(window.parts) * shape.num_iterations
        served = Counter(window.part_of(other) for other in range(step, window.end_step))
        assert served == dict.fromkeys(range(len(window.parts)), shape.num_iterations)
        step = window.end_step


def test_ranks_share_a_window_without_overlap():
    shape = StepShape(batch_size=2, accumulation=2, learner_world_size=2, steps_per_generation=2)
    windows = [WindowPlan(16, seed=1, shape=shape, rank=rank).at(1) for rank in (0, 1)]
    assert sorted(chain(*(window.sample_indices for window in windows))) == list(range(16))
    assert {(window.first_step, window.end_step) for window in windows} == {(0, 2)}


def test_samples_of_another_order_are_refused():
    first, second, third = (make_sample(sample_id=number) for number in (4, 5, 6))
    check_order([[first, second], [third]], [first, second, third], step=2)
    for brought in ([[second, first], [third]], [[first, second]]):
        with refused("order-disagrees", "training", problem="for step 2, the learner's order names [4, 5, 6]"):
            check_order(brought, [first, second, third], step=2)
