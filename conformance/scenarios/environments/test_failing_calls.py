"""Calls of environments that hang, raise, flood or die: what they cost, in real worker processes."""

from dataclasses import replace

import pytest

from conformance.doubles.ladders import TurnSide, climbing, grouped, searching, world
from conformance.doubles.locks import A, sample_of
from conformance.doubles.ranks import together
from conformance.doubles.refusals import refused
from conformance.doubles.troubles import DIES, FAILS_TO_BEGIN, FLOOD, FLOODS, HANGS, RAISES, Troubled
from rollmatch.environments.environment import generator_of
from rollmatch.environments.limits import EnvironmentLimits
from rollmatch.environments.loading import load_environment
from rollmatch.objectives.episodes import note_episodes

TROUBLED, WAITING = "conformance.doubles.troubles:Troubled", "conformance.doubles.troubles:Waiting"
LOCKED = "conformance.doubles.troubles:Locked"
LIMITS = EnvironmentLimits(timeout_s=2.0, processes=2, max_observation_bytes=FLOOD)
CODES = {
    HANGS: "environment-timeout",
    RAISES: "environment-failed",
    FLOODS: "observation-too-long",
    DIES: "environment-died",
    FAILS_TO_BEGIN: "environment-failed",
}


def episodes_of(numbers, in_world, side=None, ranks=None):
    """Trajectories of samples with these numbers, of a policy that climbs."""
    side = side or TurnSide(letters=(A,))
    samples = [sample_of(number) for number in numbers]
    return note_episodes(in_world, side.answer(samples, num=1, in_world=in_world), side.context(ranks))


def in_workers(limits=LIMITS, **fields):
    """Troubled ladders in worker processes."""
    return world(load_environment(TROUBLED, {}, key="k", limits=limits), limits=limits, **fields)


def parts_of(trajectory):
    turns = [(turn.start, turn.stop) for turn in trajectory.turns]
    return trajectory.token_ids, trajectory.rewards, turns, trajectory.is_finished, trajectory.failure


@pytest.mark.scenario(
    "environments/calls-that-hang-raise-flood-and-kill-their-process",
    clauses=["environments/a-call-that-fails-costs-its-episode#1,2,3,4,7,10"],
)
def test_each_trouble_costs_its_own_episode():
    side = TurnSide(letters=(A,))
    numbers = (0, HANGS, 6, RAISES, 7, FLOODS, 8, DIES)
    made = episodes_of(numbers, in_workers(failed_share=0.5), side)
    calm = episodes_of([0, 6, 7, 8], world(Troubled))
    assert [parts_of(one) for one in made[::2]] == [parts_of(one) for one in calm]
    failures = {one.sample.sample_id: one.failure for one in made if one.failure}
    assert {number: failure.partition("]")[0][1:] for number, failure in failures.items()} == {
        number: code for number, code in CODES.items() if number != FAILS_TO_BEGIN
    }
    assert all(f"x:{number + 1}" in failure for number, failure in failures.items())
    assert [len(one.turns) for one in made[1::2]] == [2] * 4
    (note,) = [note for event, note in side.notes if event == "played"]
    assert (note["num_episodes"], note["num_failed"], note["finished"]) == (8, 4, 4)
    assert note["failures"] == list(failures.values())


def rungs_of(snapshot, seed):
    """Where a clone stands after each of three steps."""
    twin, rungs = snapshot.clone(generator_of(seed)), []
    for _ in range(3):
        twin.step("A")
        rungs.append(twin.fingerprint())
    return rungs


def test_an_episode_with_chance_is_the_same_in_workers():
    make = load_environment(TROUBLED, {"slip": 0.5}, key="k", limits=LIMITS)
    remote = episodes_of([0, 6, 7], world(make, limits=LIMITS))
    here = episodes_of([0, 6, 7], world(load_environment(TROUBLED, {"slip": 0.5}, key="k")))
    assert [parts_of(one) for one in remote] == [parts_of(one) for one in here]
    states = [[turn.snapshot.fingerprint() for turn in one.turns] for one in remote]
    assert states == [[turn.snapshot.fingerprint() for turn in one.turns] for one in here]
    drawn, others = ([rungs_of(one[0].turns[0].snapshot, seed) for seed in range(4)] for one in (remote, here))
    assert drawn == others, "a clone's second step draws what follows the first one's numbers"


def test_an_episode_that_cannot_begin_fails_alone():
    broken, whole = episodes_of([FAILS_TO_BEGIN, 0], world(Troubled, failed_share=0.5))
    assert "reset: OSError: no board" in broken.failure
    assert (len(broken.turns), whole.failure) == (1, "")


@pytest.mark.scenario(clauses=["environments/a-call-that-fails-costs-its-episode#2"])
def test_a_coroutine_that_hangs_is_cancelled_in_the_learner():
    limits = EnvironmentLimits(timeout_s=0.5)
    make = load_environment(WAITING, {"slip": 0.0}, key="k", limits=limits)
    hung, whole = episodes_of([HANGS, 0], world(make, limits=limits, failed_share=0.5))
    assert hung.failure.startswith("[environment-timeout] x:2: step('A'): took more than 0.5 s")
    assert whole.rewards[-1][1] == 1.25


@pytest.mark.scenario(
    "environments/more-episodes-fail-than-may",
    clauses=["environments/a-call-that-fails-costs-its-episode#7,8"],
)
def test_too_many_failures_end_all_ranks():
    numbers = [[0, 6, 7, 8], [0, RAISES, RAISES, 6]]

    def play(share):
        return lambda member: episodes_of(numbers[member.rank], world(Troubled, failed_share=share), ranks=member)

    first, second = together(2, play(0.25))
    assert sum(bool(one.failure) for one in first + second) == 2

    def ends(member):
        with refused("episodes-failed", "custom.extra.environment.failed_share", problem="2 of 8 episodes") as caught:
            play(0.2)(member)
        return caught.value.problem, caught.value.is_shared

    errors = together(2, ends)
    assert errors[0] == errors[1]
    assert "[environment-failed] x:3: step('A'): KeyError: 'lost'" in errors[0][0]


@pytest.mark.scenario(clauses=["environments/a-call-that-fails-costs-its-episode#5"])
@pytest.mark.parametrize("make", [grouped, climbing, searching])
def test_an_episode_that_failed_is_masked_and_in_no_mean(make):
    in_world = world(Troubled, failed_share=0.5)
    samples = [sample_of(0), sample_of(RAISES)]
    made, side = replace(make(), world=in_world), TurnSide(letters=(A,))
    targets = made.make_segments(samples, side.answer(samples, in_world=made.world), side.context())
    (good, failed) = ([segment.policy for segment in group] for group in targets.segments)
    assert [policy.is_masked for policy in (*good, *failed)] == [False, False, True, True]
    assert {value for policy in failed for value in policy.advantages} == {0.0}
    assert made.summarize(targets.reports)["reward"] == pytest.approx(1.75)
    evaluated = made.evaluate(samples, side.answer(samples, num=1, in_world=made.world), side.context())
    assert evaluated.metrics["reward"] == pytest.approx(1.75)
    assert evaluated.parts["reward"] == [(1.75, 1.0), (0.0, 0.0)]


class Shaky(Troubled):
    """A step in seven fails."""

    def step(self, action):
        if self.rng is not None and self.rng.random() < 1 / 7:
            raise ConnectionError("gone")
        return super(Troubled, self).step(action)


@pytest.mark.scenario(clauses=["environments/a-call-that-fails-costs-its-episode#6"])
@pytest.mark.parametrize("make", [climbing, searching])
def test_a_continuation_that_failed_is_in_no_value(make):
    made, side = replace(make(), world=world(Shaky, failed_share=1.0)), TurnSide(letters=(A,))
    if make is climbing:
        made = replace(made, valuer=climbing(num_continuations=12).valuer)
    samples = [sample_of(0), sample_of(6), sample_of(7)]
    targets = made.make_segments(samples, side.answer(samples, in_world=made.world), side.context())
    reports = [one for one in targets.reports if hasattr(one, "values")]
    assert 0 < len(reports) < 6, "some episodes failed, others were played to their end"
    assert all(report.values == pytest.approx((1.75, 1.5, 1.25)) for report in reports), "without chance but failures"


@pytest.mark.scenario(clauses=["environments/a-call-that-fails-costs-its-episode#9"])
def test_a_limit_that_cannot_be_kept_is_refused():
    limits = EnvironmentLimits(timeout_s=2.0)
    with refused("call-without-end", "custom.extra.environment.call_timeout_s", problem="Troubled"):
        load_environment(TROUBLED, {}, key="k", limits=limits)
    assert load_environment(WAITING, {}, key="k", limits=limits)
    assert load_environment(TROUBLED, {}, key="k", limits=LIMITS)


def test_an_environment_that_cannot_be_pickled_ends_the_run_at_once():
    with refused("environment-not-pickled", "x:1", remedy="processes: 0"):
        episodes_of([0], world(load_environment(LOCKED, {}, key="k", limits=LIMITS), limits=LIMITS))
    assert episodes_of([0], world(load_environment(LOCKED, {}, key="k")))[0].failure == ""
