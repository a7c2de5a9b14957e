import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmatch.data import LearnerOrder

SEEDS = st.integers(0, 2**40)
EPOCHS = st.integers(0, 10_000)


def walk(num_samples, seed, epoch):
    order = LearnerOrder(num_samples, seed=seed)
    order.set_epoch(epoch)
    return list(order)


@given(num_samples=st.integers(0, 200), seed=SEEDS, epoch=EPOCHS)
def test_every_epoch_is_a_permutation_and_can_be_walked_again(num_samples, seed, epoch):
    walked = walk(num_samples, seed, epoch)
    assert sorted(walked) == list(range(num_samples))
    assert walked == walk(num_samples, seed, epoch)
    assert all(type(index) is int for index in walked)
    assert len(LearnerOrder(num_samples, seed=seed)) == num_samples


@given(seed=SEEDS, epochs=st.lists(EPOCHS, min_size=2, max_size=2, unique=True))
def test_epochs_differ(seed, epochs):
    assert walk(100, seed, epochs[0]) != walk(100, seed, epochs[1])


@pytest.mark.scenario(
    "determinism/another-seed-gives-another-order", clauses=["data-ownership/the-learner-owns-the-order-of-the-data#1"]
)
@given(epoch=EPOCHS, seeds=st.lists(SEEDS, min_size=2, max_size=2, unique=True))
def test_seeds_differ(epoch, seeds):
    assert walk(100, seeds[0], epoch) != walk(100, seeds[1], epoch)


def test_seed_and_epoch_do_not_add_up():
    assert walk(100, 1, 2) != walk(100, 2, 1)


def test_coming_back_to_an_epoch_gives_its_order_again():
    order = LearnerOrder(50, seed=3)
    first = list(order)
    order.set_epoch(1)
    assert list(order) != first
    order.set_epoch(0)
    assert list(order) == first


def test_an_order_is_the_same_in_every_process():
    code = "from rollmatch.data import LearnerOrder; o = LearnerOrder(30, seed=7); o.set_epoch(2); print(list(o))"
    answers = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
        for env in (os.environ | {"PYTHONHASHSEED": "1"}, os.environ | {"PYTHONHASHSEED": "2"})
    }
    assert answers == {f"{walk(30, 7, 2)}\n"}


def test_the_order_is_pinned_so_that_old_runs_resume():
    assert walk(8, 42, 0) == [3, 4, 2, 7, 6, 1, 5, 0]
