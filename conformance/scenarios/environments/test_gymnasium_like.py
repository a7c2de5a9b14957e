"""Environments of gymnasium's form: clones by deep copy or by replay, and VinePPO with one."""

import pickle
import threading
from dataclasses import replace

import numpy as np
import pytest

from conformance.doubles.ladders import SLIP, Ladder, TurnSide, climbing, reports_of, targets_of, values_in, world
from conformance.doubles.locks import A, sample_of, segments_of
from rollmatch.environments.environment import begin, generator_of, take_step
from rollmatch.environments.loading import load_environment
from rollmatch.errors import TargetError

HERE = "conformance.scenarios.environments.test_gymnasium_like"
KEY = "custom.extra.environment.name"


class Dice:
    """Guess the next throw; like gymnasium's ``Env``, chance comes from ``np_random``."""

    def __init__(self, sides=6):
        self.sides, self.throws = sides, []

    def reset(self, *, seed=None, options=None):
        self.np_random, self.sides = np.random.default_rng(seed), options.get("sides", self.sides)
        return f"a die of {self.sides} sides", {}

    def step(self, action):
        self.throws.append(int(self.np_random.integers(self.sides)))
        return f"{self.throws[-1]}", float(action == str(self.throws[-1])), len(self.throws) == 3, False, {"more": 1}


class GymLadder:
    """The ladder in gymnasium's form."""

    def __init__(self, slip=SLIP):
        self.inner = Ladder(slip)

    def reset(self, *, seed=None, options=None):
        self.np_random = np.random.default_rng(seed)
        return self.inner.reset(sample_of(), None), {}

    def step(self, action):
        self.inner.rng = self.np_random
        return (*self.inner.step(action), {})


class Handle(Dice):
    """Holds what cannot be copied; its chance is the seed's."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class ClockEnv(Handle):
    """Shows something else at every replay."""

    shown = 0

    def step(self, action):
        ClockEnv.shown += 1
        return f"{ClockEnv.shown}", 0.0, False, False, {}


def begun(name, metadata=None, **options):
    sample = replace(sample_of(), metadata=metadata or {})
    return begin(load_environment(f"{HERE}:{name}", options, key=KEY), sample, run_seed=7)


def throws(environment, num=2):
    return [take_step(environment, "1", key="x:1").observation for _ in range(num)]


@pytest.mark.scenario(
    "environments/a-gymnasium-like-class-is-copied",
    clauses=["environments/an-environment-is-a-class-that-answers-the-policy#7"],
)
def test_a_clone_is_a_copy_with_a_generator_of_its_own():
    made, shown = begun("Dice", sides=100)
    assert shown == "a die of 100 sides"
    throws(made, 1)
    twin, again = made.clone(generator_of(1)), made.clone(generator_of(1))
    other = made.clone(generator_of(2))
    assert made.fingerprint() == twin.fingerprint() == other.fingerprint()
    assert throws(twin) == throws(again) != throws(other)
    assert twin.fingerprint() != made.fingerprint()
    assert take_step(made, "1", key="x:1").terminated is False
    assert take_step(made, "1", key="x:1").terminated is True


def test_a_sample_begins_alike_and_environments_can_be_pickled():
    (one, _), (same, _) = begun("Dice", sides=100), begun("Dice", sides=100)
    assert one.fingerprint() == same.fingerprint()
    assert throws(pickle.loads(pickle.dumps(one))) == throws(same)


def test_a_reset_forgets_what_was_and_seeds_have_31_bits():
    made, _ = begun("Dice")
    seeds = set()
    for number in range(20):
        made.reset(sample_of(), generator_of(number))
        seed, *history = made.fingerprint()
        assert history == [(None, "a die of 6 sides")]
        seeds.add(seed)
        throws(made, 1)
    assert len(seeds) == 20
    assert 2**30 < max(seeds) < 2**31


@pytest.mark.scenario(
    "environments/what-cannot-be-copied-is-replayed",
    clauses=["environments/an-environment-is-a-class-that-answers-the-policy#8"],
)
def test_what_cannot_be_copied_is_replayed():
    made, shown = begun("Handle", metadata={"sides": 100})
    assert shown == "a die of 100 sides", "metadata are options of a reset"
    throws(made, 1)
    twin = made.clone(generator_of(1))
    assert twin.fingerprint() == made.fingerprint()
    assert throws(twin) == throws(made)
    assert twin._inner.lock is not made._inner.lock


@pytest.mark.scenario(clauses=["environments/an-environment-is-a-class-that-answers-the-policy#9"])
def test_a_replay_that_differs_is_an_error():
    made, _ = begun("ClockEnv")
    throws(made, 1)
    with pytest.raises(TargetError, match="where '1' was shown before") as error:
        made.clone(generator_of(1))
    assert error.value.code == "replay-differs"


def test_a_failing_reset_names_the_sample(monkeypatch):
    monkeypatch.setattr(Dice, "reset", lambda self, *, seed=None, options=None: 1 / 0)
    with pytest.raises(TargetError, match="ZeroDivisionError"):
        begun("Dice")


def climbed(side, num_continuations, **options):
    make = load_environment(f"{HERE}:GymLadder", options, key=KEY)
    return targets_of(side, climbing(in_world=world(make), num_continuations=num_continuations))


@pytest.mark.scenario("environments/vineppo-with-a-gymnasium-like-class")
def test_vineppo_values_its_states_by_clones():
    for report in reports_of(climbed(TurnSide(letters=(A,)), 2, slip=0.0)):
        assert report.values == pytest.approx((1.75, 1.5, 1.25))
    targets = climbed(TurnSide(), 300)
    for segment, report in zip(segments_of(targets), reports_of(targets), strict=True):
        assert report.values == pytest.approx(values_in(segment), abs=0.13)
