"""How episodes are gone on from: in the middle of a turn, in a tree, and on several ranks at once."""

import pytest

from conformance.doubles.company import together
from conformance.objectives.ladders import Ladder, TurnSide, climbing, played, reply, world
from conformance.objectives.locks import A, B, sample_of
from rollmatch.objectives.environment import generator_of
from rollmatch.objectives.vineppo.continuation import ContinuationRequest
from rollmatch.objectives.vineppo.multi_turn import MultiTurn
from rollmatch.objectives.vineppo.split import FixedTokens, Turns
from rollmatch.objectives.vineppo.trajectory import Trajectory, Turn, state_at, states_of
from rollmatch.objectives.vineppo.tree import SearchRules, Tree
from rollmatch.rollout.backend import Decoding

SAMPLES = [sample_of(0), sample_of(1)]


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
    wishes = [[ContinuationRequest(state=state_at(one, 0), seed=5)], []]

    def go_on(member):
        side = TurnSide(letters=(B,))
        made = MultiTurn(world(), side.context(member), logprobs=False).go_on(wishes[member.rank])
        return [len(requests) for requests, _ in side.calls], len(made), member.gather("after")

    (first, num_first, _), (second, num_second, after) = together(2, go_on)
    assert first == [1] * 5
    assert second == [0] * 5
    assert (num_first, num_second, after) == (1, 0, ["after"] * 2)


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
        turns=tuple(turns[after:]) if after else tuple(turns),
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
