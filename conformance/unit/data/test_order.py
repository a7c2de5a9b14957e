"""The order of samples, and windows: what the data loader will bring, known beforehand."""

import os
import subprocess
import sys
from collections import Counter
from itertools import chain, combinations

import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from conformance.doubles.records import make_sample
from conformance.doubles.refusals import refused
from rollmatch.data import LearnerOrder, Reuse, ReusedOrder, StepShape, WindowPlan
from rollmatch.data.order import check_order, split_evenly

SEEDS = st.integers(0, 2**40)
EPOCHS = st.integers(0, 10_000)


def walk(num_samples, seed, epoch):
    order = LearnerOrder(num_samples, seed=seed)
    order.set_epoch(epoch)
    return list(order)


@given(num_samples=st.integers(0, 200), seed=SEEDS, epoch=EPOCHS)
def test_every_epoch_is_a_permutation_and_can_be_walked_again(num_samples, seed, epoch):
    order = LearnerOrder(num_samples, seed=seed)
    list(order)
    order.set_epoch(epoch)
    walked = list(order)
    assert sorted(walked) == list(range(num_samples))
    assert walked == walk(num_samples, seed, epoch)
    assert all(type(index) is int for index in walked)
    assert len(LearnerOrder(num_samples, seed=seed)) == num_samples


@pytest.mark.scenario(
    "determinism/another-seed-gives-another-order", clauses=["data-ownership/the-learner-owns-the-order-of-the-data#1"]
)
@given(epoch=EPOCHS, seeds=st.lists(SEEDS, min_size=2, max_size=2, unique=True))
def test_seeds_and_epochs_differ(epoch, seeds):
    orders = [walk(100, seeds[0], epoch), walk(100, seeds[1], epoch), walk(100, seeds[0], epoch + 1)]
    assert all(one != other for one, other in combinations(orders, 2))
    assert walk(100, 1, 2) != walk(100, 2, 1)


def test_an_order_is_the_same_in_every_process():
    code = "from rollmatch.data import LearnerOrder; o = LearnerOrder(30, seed=7); o.set_epoch(2); print(list(o))"
    answers = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
        for env in (os.environ | {"PYTHONHASHSEED": "1"}, os.environ | {"PYTHONHASHSEED": "2"})
    }
    assert answers == {f"{walk(30, 7, 2)}\n"}


def test_the_order_is_pinned_so_that_old_runs_resume():
    assert walk(8, 42, 0) == [3, 4, 2, 7, 6, 1, 5, 0]


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


def test_without_reuse_the_order_is_the_learners_own():
    order = LearnerOrder(7, seed=3)
    reused = ReusedOrder(order, StepShape(batch_size=2, steps_per_generation=3))
    assert list(reused) == list(order)
    assert len(reused) == 7
    small = ReusedOrder(LearnerOrder(3, seed=3), StepShape(batch_size=4, num_iterations=2))
    once = list(LearnerOrder(3, seed=3))
    assert (list(small), len(small)) == ([*once, once[0]] * 2, 8), "a data set smaller than a step fills one"


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


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 9))
def test_parts_of_about_as_many_items_hold_each_item_once(items, num_parts):
    parts = split_evenly(items, num_parts)
    assert [item for part in parts for item in part] == items
    sizes = [len(part) for part in parts]
    assert (len(sizes), sizes) == (num_parts, sorted(sizes, reverse=True))
    assert sizes[0] - sizes[-1] <= 1


def test_rollouts_are_used_once_where_nothing_else_is_said():
    once = Reuse()
    shape = StepShape(batch_size=2, steps_per_generation=once.steps_per_generation, num_iterations=once.num_iterations)
    assert once.repeat(["a", "b"]) == ["a", "b"]
    assert list(ReusedOrder(LearnerOrder(6, seed=3), shape)) == list(LearnerOrder(6, seed=3))
    window = WindowPlan(6, seed=3, shape=shape, rank=0).at(1)
    assert (window.first_step, window.end_step) == (1, 2)
