"""What an environment must be, and how one that is not is rejected."""

import pickle
import sys
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from conformance.doubles.ladders import Ladder
from conformance.doubles.locks import sample_of
from conformance.doubles.refusals import refused
from rollmatch.environments.environment import begin, generator_of, show, take_step
from rollmatch.environments.loading import load_environment
from rollmatch.environments.verifiers_like import OncePerProcess

LADDER = "conformance.doubles.ladders:Ladder"


class AnsweringEnvironment(Ladder):
    """Answers every step alike."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def step(self, action):
        return self.answer


class Silent(Ladder):
    def reset(self, sample, rng):
        return None


class ForgetfulEnvironment(Ladder):
    """Clones start from the beginning."""

    def reset(self, sample, rng):
        self.rung = 1
        return ""

    def clone(self, rng):
        return ForgetfulEnvironment()


class RunningEnvironment(ForgetfulEnvironment):
    """Clones are a step ahead."""

    def clone(self, rng):
        twin = RunningEnvironment()
        twin.rung = self.rung + 1
        return twin


class WithoutClone:
    """All methods but one."""

    def reset(self, sample, rng):
        return ""

    def step(self, action):
        return "", 0.0, True, False

    def fingerprint(self):
        return 0


class WithClone(WithoutClone):
    def clone(self, rng):
        return WithClone()


@pytest.mark.scenario(
    "environments/a-class-without-clone-is-refused",
    "environments/the-class-with-clone-is-accepted",
    clauses=["environments/an-environment-is-a-class-that-answers-the-policy#1,2,3"],
)
@pytest.mark.parametrize(
    ("name", "options", "code", "problem"),
    [
        ("Ladder", {}, "environment-unknown", ""),
        ("no_such_module:Ladder", {}, "environment-unknown", ""),
        ("conformance.doubles.ladders:NoSuch", {}, "environment-unknown", ""),
        ("builtins:dict", {}, "environment-misfit", "builtins:dict has no reset, clone, step, fingerprint"),
        (LADDER, {"height": 3}, "environment-misfit", ""),
        (f"{__name__}:WithoutClone", {}, "environment-misfit", f"{__name__}:WithoutClone has no clone"),
    ],
)
def test_a_wrong_name_or_class_is_refused_before_anything_starts(name, options, code, problem):
    with refused(code, "custom.extra.environment.name", problem=problem) as caught:
        load_environment(name, options, key="custom.extra.environment.name")
    assert caught.value.remedy
    assert load_environment(LADDER, {"slip": 0.5}, key="k")().slip == 0.5
    assert isinstance(load_environment(f"{__name__}:WithClone", {}, key="k")(), WithClone)


@pytest.mark.scenario(
    "environments/a-step-that-is-answered-in-three-parts-is-refused",
    "environments/what-follows-the-fourth-part-is-ignored",
    clauses=["environments/a-wrong-answer-of-an-environment-stops-the-run#1,4"],
)
@pytest.mark.parametrize(
    "answer",
    [
        None,
        ("seen", 1.0, True),
        (5, 1.0, True, False),
        ("seen", "1", True, False),
        ("seen", float("nan"), True, False),
        ("seen", 1.0, 1, False),
        ("seen", 1.0, True, None),
    ],
)
def test_a_step_is_answered_in_four_parts(answer):
    with refused("step-malformed", "x:1"):
        take_step(AnsweringEnvironment(answer), "A", key="x:1")
    good = take_step(AnsweringEnvironment(("seen", np.float32(1), np.bool_(True), False, {"info": 1})), "A", key="x:1")
    assert good[:4] == ("seen", 1.0, True, False)


def test_what_is_no_action_is_rejected_by_the_environment_alone():
    made, _ = begin(Ladder, sample_of(), run_seed=1)
    with refused("action-unparsable"):
        take_step(made, "C", key="x:1")
    assert take_step(made, "B", key="x:1").observation == "<0>"


@pytest.mark.scenario(clauses=["environments/a-wrong-answer-of-an-environment-stops-the-run#2,3,4"])
@pytest.mark.parametrize(
    ("make", "code"),
    [
        (Silent, "observation-not-text"),
        (ForgetfulEnvironment, "clone-differs"),
        (RunningEnvironment, "clone-differs"),
        (lambda: AnsweringEnvironment.__new__(AnsweringEnvironment), "environment-failed"),
    ],
)
def test_what_cannot_begin_is_named(make, code):
    with refused(code, "x:1"):
        begin(make, sample_of(), run_seed=1)
    assert begin(Ladder, sample_of(), run_seed=1)[1] == "rung 0 of 0"


def test_a_clone_goes_on_like_the_original_with_the_same_generator():
    made, _ = begin(Ladder, sample_of(), run_seed=1)
    original, twin = made.clone(generator_of(3)), made.clone(generator_of(3))
    other = pickle.loads(pickle.dumps(made)).clone(generator_of(3))
    paths = [[take_step(one, action, key="") for action in "ABAB"] for one in (original, twin, other)]
    assert paths[0] == paths[1] == paths[2]
    assert made.fingerprint() == 0


@pytest.mark.scenario(clauses=["environments/an-environment-is-a-class-that-answers-the-policy#4"])
def test_the_first_observation_ends_the_prompt():
    shown = show(Ladder, sample_of(4), run_seed=1)
    assert shown.messages == (("user", "?\nrung 0 of 4"),)
    assert (shown.sample_id, shown.origin) == (4, "x:5")


class Drawn(Ladder):
    """Shows what it drew."""

    def reset(self, sample, rng):
        self.rng = rng
        return str(rng.integers(2**62))


@pytest.mark.scenario(clauses=["environments/episodes-can-be-played-again#1"])
def test_a_sample_begins_the_same_for_every_attempt_of_a_run():
    shown = [begin(Drawn, sample_of(number), run_seed=seed)[1] for seed, number in ((1, 0), (1, 0), (1, 1), (2, 0))]
    assert shown[0] == shown[1]
    assert len(set(shown)) == 3


def test_generators_belong_to_their_numbers():
    places = product((0, 1), (0, 1), "ab")
    assert len({generator_of(*place).integers(2**62) for place in places}) == 8


class Later:
    """As environments of verifiers 0.2 and newer are."""

    __module__ = "verifiers.v1.env"


@pytest.mark.scenario(clauses=["environments/an-environment-is-a-class-that-answers-the-policy#14"])
def test_an_environment_of_verifiers_v1_is_refused_with_its_version(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(__version__="0.4.0"))
    with refused("environment-misfit", "name", problem="verifiers.v1 (verifiers 0.4.0)"):
        load_environment(f"{__name__}:Later", {}, key="name")


class Newer:
    """As environments of verifiers 0.1.14 are: their tools are called otherwise."""

    __module__ = "verifiers.envs.multiturn_env"


def test_an_environment_of_verifiers_with_other_fields_is_refused_with_its_version(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(__version__="0.1.14"))
    with refused("environment-misfit", "name", problem="is of verifiers 0.1.14", remedy="verifiers==0.1.9"):
        load_environment(f"{__name__}:Newer", {}, key="name")


def test_an_environment_of_verifiers_is_made_once_per_process():
    once = OncePerProcess(list)
    assert once() is once()
    assert pickle.loads(pickle.dumps(once))() is not once()
