"""How episodes of several turns end, are continued, and are played again."""

from dataclasses import fields, replace

import pytest

from conformance.doubles.ladders import Ladder, TurnSide, climbing, grouped, played, reply, searching, world
from conformance.doubles.locks import VOCABULARY, A, B, sample_of, segments_of
from conformance.doubles.ranks import together
from conformance.doubles.refusals import refused
from rollmatch.data import Reuse
from rollmatch.environments.continuation import ContinuationRequest
from rollmatch.environments.environment import generator_of
from rollmatch.environments.trajectory import Trajectory, Turn, state_at, states_of
from rollmatch.objectives.grpo.objective import GrpoObjective
from rollmatch.objectives.vineppo.multi_turn import MultiTurn
from rollmatch.objectives.vineppo.split import FixedTokens, Turns
from rollmatch.objectives.vineppo.tree import SearchRules, Tree
from rollmatch.rollout.backend import Decoding

SAMPLES = [sample_of(0), sample_of(1)]


@pytest.mark.scenario(
    "environments/a-text-that-is-no-action-ends-the-episode",
    clauses=["environments/a-wrong-answer-of-an-environment-stops-the-run#5,6"],
)
def test_what_is_no_action_ends_the_episode_and_is_counted():
    (c,) = VOCABULARY.encode("C")
    side = TurnSide(letters=(c,))
    episodes = [one.trajectory for one in played(side)]
    assert [(one.is_finished, one.rewards, one.total_return, len(one.turns)) for one in episodes] == [
        (True, (), 0, 1)
    ] * 4
    assert [one.token_ids for one in episodes] == [(c,)] * 4
    assert side.calls == [], "no further turn was requested"
    ((event, note),) = side.notes
    assert (event, note["num_unparsable"], note["num_episodes"], note["finished"]) == ("played", 4, 4, 4)
    assert note["unparsable"] == ["'C' is neither A nor B"] * 4
    assert climbing().make_segments(SAMPLES, side.answer(SAMPLES), side.context()).reports[0].total_return == 0.0
    played(side, num=3)
    assert (side.notes[-1][1]["num_unparsable"], len(side.notes[-1][1]["unparsable"])) == (6, 5)
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
        def generate(self, requests, decoding):
            self.version = 4
            return super().generate(requests, decoding)

    with refused("continuation-outdated", "x:1"):
        played(Moving())
    played(TurnSide())


def test_an_environment_that_fails_stops_the_run_and_is_named():
    class Broken(Ladder):
        def step(self, action):
            raise KeyError(action)

        def clone(self, rng):
            return Broken()

    with refused("episodes-failed", problem="4 of 4 episodes") as caught:
        played(TurnSide(), world(Broken))
    assert "[environment-failed] x:1: step(" in caught.value.problem
    assert "KeyError" in caught.value.problem
    played(TurnSide(), world(Ladder))


def test_in_mid_turn_the_rest_of_the_turn_is_left():
    side = TurnSide(decoding=Decoding(max_new_tokens=3, temperature=1.0))
    made = climbing(splitter=FixedTokens(num_tokens=1), num_continuations=1)
    made.make_segments(SAMPLES, side.answer(SAMPLES), side.context())
    continued = next(requests for requests, _ in side.calls if ".c" in requests[0].request_id)
    left = {request.prefix_token_ids[-1:]: request.max_new_tokens for request in continued}
    assert {left[last] for last in left if last and last[0] in (A, B)} == {2}
    assert left[()] == 3


def test_ranks_take_part_in_waves_that_have_nothing_of_theirs():
    one = played(TurnSide(letters=(B,)))[0].trajectory
    requests = [[ContinuationRequest(state=state_at(one, 0), seed=5)], []]

    def continue_all(member):
        side = TurnSide(letters=(B,))
        made = MultiTurn(world(), side.context(member), logprobs=False).continue_states(requests[member.rank])
        return [len(requests) for requests, _ in side.calls], len(made), member.gather("after")

    (first, num_first, _), (second, num_second, after) = together(2, continue_all)
    assert first == [1] * 5
    assert second == [0] * 5
    assert (num_first, num_second, after) == (1, 0, ["after"] * 2)


def test_what_was_there_and_what_is_observed_counts_as_sure_in_a_continuation():
    side = TurnSide(letters=(B,), has_logprobs=True)
    state = state_at(one := played(side)[0].trajectory, one.turns[1].start)
    wished = [ContinuationRequest(state=state, seed=5)]
    (made,) = MultiTurn(world(), side.context(), logprobs=True).continue_states(wished)
    written = {place for turn in made.turns for place in range(turn.start, turn.stop)}
    assert made.logprobs == tuple(-0.7 if place in written else 0.0 for place in range(len(made.token_ids)))
    assert min(written) == state.position > 0


def climbed(rungs, *, after=0):
    """A trajectory of as many turns; it was paid one per turn."""
    seen, turns, ids, ladder = reply("<>", False), [], [], Ladder()
    for number in range(rungs):
        ladder.rung = number
        turns.append(Turn(start=len(ids), stop=len(ids) + 1, snapshot=ladder.clone(generator_of(0)), number=number))
        ids += [A, *(seen if number < rungs - 1 else ())]
    rewards = tuple((turn.stop, 1.0) for turn in turns if turn.number >= after)
    return Trajectory(
        sample=sample_of(), prompt_token_ids=(1,), token_ids=tuple(ids), rewards=rewards, policy_version=1,
        turns=tuple(turns[after:]) if after else tuple(turns), is_finished=True,
    )  # fmt: skip


def test_a_search_counts_what_was_paid_above_the_place_it_went_on_from():
    whole = climbed(3)
    tree = Tree(state_at(whole, 0), SearchRules())
    path = tree.add(whole, Turns().cuts(whole))
    assert [(node.visits, node.total) for node in path] == [(1, 3.0), (1, 2.0), (1, 1.0)]
    continued = climbed(3, after=1)  # it knows nothing of what was paid before it
    tree.add(continued, Turns().cuts(whole), start=path[1])
    assert [(node.visits, node.total) for node in path] == [(2, 6.0), (2, 4.0), (2, 2.0)]
    assert [state.fingerprint for state in states_of(whole, Turns().cuts(whole))] == [0, 1, 2]


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_states_hold_the_environment_as_it_was_before_their_turn(num_tokens):
    whole = climbed(3)
    for state in states_of(whole, FixedTokens(num_tokens=num_tokens).cuts(whole)):
        assert state.turn.start <= state.position
        assert state.fingerprint == state.turn.number == state.turn.snapshot.rung


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
    asked = made.make_segments(SAMPLES, side.answer(SAMPLES, num=8, in_world=in_world), side.context()).reports[-1]
    assert asked.num_continuations == 2 * len(places)


@pytest.mark.scenario(
    "environments/three-methods-and-one-seed", clauses=["environments/episodes-can-be-played-again#3"]
)
def test_three_methods_learn_from_the_same_episodes():
    episodes = []
    for made in (grouped(), climbing(), searching()):
        side = TurnSide()
        targets = made.make_segments(SAMPLES, side.answer(SAMPLES, in_world=made.world), side.context())
        episodes.append([(one.token_ids, one.policy.is_written) for one in segments_of(targets)])
    assert len(episodes[0]) == 4
    assert episodes[0] == episodes[1] == episodes[2]


def test_an_objective_of_the_users_has_an_advantage_for_each_completion():
    class OneOnly(GrpoObjective):
        _advantages = staticmethod(lambda judged, context: [0.0])

    made, side = OneOnly(**{field.name: getattr(grouped(), field.name) for field in fields(GrpoObjective)}), TurnSide()
    with pytest.raises(ValueError, match="shorter"):
        made.make_segments(SAMPLES, side.answer(SAMPLES), side.context())
