"""How episodes of several turns end, and what stops a run."""

import pytest

from conformance.objectives.ladders import Ladder, TurnSide, climbing, played, reply, world
from conformance.objectives.locks import VOCABULARY, B, sample_of
from rollmatch.objectives.environment import EnvironmentFailed
from rollmatch.objectives.vineppo.continuation import ContinuationOutdated

SAMPLES = [sample_of(0), sample_of(1)]


@pytest.mark.scenario(
    "environments/a-text-that-is-no-action-ends-the-episode",
    clauses=["environments/a-wrong-answer-of-an-environment-stops-the-run#6,7"],
)
def test_what_is_no_action_ends_the_episode_and_is_counted():
    (c,) = VOCABULARY.encode("C")
    side = TurnSide(letters=(c,))
    one = played(side)[0]
    assert (one.trajectory.is_finished, one.trajectory.rewards, len(one.trajectory.turns)) == (True, (), 1)
    (_, told) = side.notes[0]
    assert told["num_unparsable"] == 4
    assert told["unparsable"][0] == "'C' is neither A nor B"
    assert climbing().make_segments(SAMPLES, side.answer(SAMPLES), side.context()).reports[0].total_return == 0.0
    good = TurnSide()
    played(good)
    assert good.notes[0][1]["num_unparsable"] == 0


@pytest.mark.scenario(
    "environments/no-room-for-another-turn",
    clauses=["environments/an-episode-ends-by-its-environment-or-by-a-limit#1,2"],
)
def test_an_episode_ends_where_no_turn_fits():
    side = TurnSide(letters=(B,))
    step = len((B, *reply("<0>", False)))
    assert step == 5
    one = played(side, world(max_response_tokens=step + 1))[0].trajectory
    assert (len(one.turns), one.is_finished, len(one.token_ids)) == (2, False, step + 1)
    shorter = played(side, world(max_response_tokens=step))[0].trajectory
    assert (len(shorter.turns), shorter.is_finished, len(shorter.token_ids)) == (1, False, 1)


@pytest.mark.scenario(clauses=["environments/episodes-can-be-played-again#5"])
def test_a_sync_in_mid_episode_is_refused():
    class Moving(TurnSide):
        def ask(self, requests, decoding):
            self.version = 4
            return super().ask(requests, decoding)

    with pytest.raises(ContinuationOutdated) as caught:
        played(Moving())
    assert (caught.value.code, caught.value.key) == ("continuation-outdated", "x:1")
    played(TurnSide())


@pytest.mark.scenario(clauses=["environments/a-wrong-answer-of-an-environment-stops-the-run#4,5"])
def test_an_environment_that_fails_stops_the_run_and_is_named():
    class Broken(Ladder):
        def step(self, action):
            raise KeyError(action)

        def clone(self, rng):
            return Broken()

    with pytest.raises(EnvironmentFailed) as caught:
        played(TurnSide(), world(Broken))
    assert (caught.value.code, caught.value.key) == ("environment-failed", "x:1")
    assert "step(" in caught.value.problem
    assert "KeyError" in caught.value.problem
    played(TurnSide(), world(Ladder))
