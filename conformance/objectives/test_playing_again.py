"""Episodes that are played again: by another attempt, by another method, and where states only look alike."""

from dataclasses import replace

import pytest

from conformance.objectives.ladders import Ladder, TurnSide, climbing, grouped, played, searching, world
from conformance.objectives.locks import A, sample_of
from rollmatch.data import Reuse
from rollmatch.objectives.vineppo.multi_turn import EpisodeRunner

SAMPLES = [sample_of(0), sample_of(1)]


class Blind(Ladder):
    """Shows nothing of where one stands."""

    def clone(self, rng):
        twin = Blind(self.slip)
        twin.rung, twin.rng = self.rung, rng
        return twin

    def step(self, action):
        return "<>", *super().step(action)[1:]


@pytest.mark.scenario(
    "environments/equal-ids-in-different-places", clauses=["environments/continuations-go-on-from-a-clone#4"]
)
def test_equal_ids_on_different_rungs_are_different_states():
    side, in_world = TurnSide(letters=(A,)), world(Blind)
    made = replace(climbing(in_world=in_world, num_continuations=2), reuse=Reuse(num_rollouts=8))
    episodes = [one.trajectory for one in played(side, in_world, num=8)]
    places = {
        (one.sample.sample_id, one.token_ids[: turn.start], turn.snapshot.rung)
        for one in episodes
        for turn in one.turns
    }
    assert len(places) > len({place[:2] for place in places}), "some stand elsewhere after the same ids"
    asked = made.make_segments(SAMPLES, side.answer(SAMPLES, num=8), side.context()).reports[-1]
    assert asked.num_continuations == 2 * len(places)


@pytest.mark.scenario(clauses=["environments/episodes-can-be-played-again#2"])
def test_every_attempt_meets_a_chance_of_its_own():
    attempts = [one.trajectory.rewards for one in played(TurnSide(letters=(A,)), num=8)]
    assert len(set(attempts[:8])) > 1, "the same letters, and other slips"
    assert attempts == [one.trajectory.rewards for one in played(TurnSide(letters=(A,)), num=8)]


def noted(made, monkeypatch):
    """The episodes that an objective plays for a window."""
    found, play = [], EpisodeRunner.play
    monkeypatch.setattr(EpisodeRunner, "play", lambda *told: found.extend(play(*told)) or found)
    side = TurnSide()
    made.make_segments(SAMPLES, side.answer(SAMPLES), side.context())
    return [one.trajectory for one in found]


@pytest.mark.scenario(
    "environments/three-methods-and-one-seed", clauses=["environments/episodes-can-be-played-again#3"]
)
def test_three_methods_play_the_same_episodes():
    told = []
    for made in (grouped(), climbing(), searching()):
        with pytest.MonkeyPatch.context() as patch:
            told.append(noted(made, patch))
    assert len(told[0]) == 4
    assert any(one.rewards for one in told[0])
    assert told[0] == told[1] == told[2]
