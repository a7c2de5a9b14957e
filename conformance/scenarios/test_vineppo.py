"""Capability ``vineppo``, scenario by scenario: values, advantages, states, trees."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.doubles.company import alone, together
from conformance.doubles.tokenizer import make_vocabulary
from conformance.objectives.vineppo.locks import STOP, LockPolicy, sample_of, trajectory_of, value_of, waves_of
from rollmatch.objectives.vineppo.advantage import normalize, spread, step_advantages
from rollmatch.objectives.vineppo.continuation import ContinuationOutdated
from rollmatch.objectives.vineppo.search import Forest, SearchBudget, TreeValues
from rollmatch.objectives.vineppo.split import FixedTokens, Lines, LowProbability, Sentences, Turns
from rollmatch.objectives.vineppo.trajectory import Trajectory, Turn, state_at, states_of
from rollmatch.objectives.vineppo.tree import SearchRules, Tree, TreeOutdated
from rollmatch.objectives.vineppo.value import ContinuationValues, ValueRules

RIGHT, WRONG = (0, 0, 0, 0, 2, 0, STOP), (0, 1, 0, 0, 2, 0, STOP)
SYMBOLS, PAIRS = FixedTokens(num_tokens=1), FixedTokens(num_tokens=2)


def values_of(trajectories, policy, *, splitter=SYMBOLS, company=None, **rules):
    cuts = [splitter.cuts(one) for one in trajectories]
    return ContinuationValues(ValueRules(**rules)).values_of(trajectories, cuts, waves_of(policy, company))


@pytest.mark.scenario(clauses=["vineppo/a-value-is-the-plain-mean-of-fresh-continuations#1"])
def test_a_value_is_the_mean_of_k_returns():
    policy = LockPolicy()
    valued = values_of([trajectory_of(RIGHT)], policy, num_continuations=400)[0]
    truth = [value_of(RIGHT[:place]) for place in range(7)]
    assert valued.values == pytest.approx(truth, abs=0.07)
    assert valued.counts == (400,) * 7
    assert policy.num_continuations == 7 * 400


@pytest.mark.scenario(clauses=["vineppo/a-value-is-the-plain-mean-of-fresh-continuations#2"])
def test_a_trajectory_is_never_among_its_own_continuations():
    hopeless = LockPolicy(((0.25,) * 4, (0, 1, 0, 0), *[(0.25,) * 4] * 4))
    valued = values_of([trajectory_of(RIGHT)] * 2, hopeless, num_continuations=4, siblings="prompt")
    assert [one.values[0] for one in valued] == [0.25, 0.25]
    alone_valued = values_of([trajectory_of(RIGHT)], hopeless, num_continuations=4, siblings="all")
    assert alone_valued[0].values[0] == 0.0


@pytest.mark.scenario("vineppo/the-budget-shrinks-with-the-prefix")
def test_the_budget_shrinks_with_the_prefix():
    long = Trajectory(
        sample=sample_of(),
        prompt_token_ids=(1, 2, 3),
        token_ids=(5,) * 60,
        rewards=((60, 1.0),),
        policy_version=1,
    )
    assert state_at(long, 37).budget_left(100) == 63


@pytest.mark.scenario(
    "vineppo/no-value-is-bought-for-a-finished-response",
    clauses=["vineppo/a-value-is-the-plain-mean-of-fresh-continuations#4"],
)
def test_no_value_is_bought_for_a_finished_response():
    policy, response = LockPolicy(), trajectory_of(RIGHT)
    cuts = (0, 1, 2, 3, 5, 7)
    valued = ContinuationValues(ValueRules()).values_of([response], [cuts], waves_of(policy))[0]
    assert {wish.state.position for wish in policy.asked[0]} == {0, 1, 2, 3, 5}
    advantages = step_advantages(valued.values, response.step_rewards(cuts))
    assert advantages[-1] == 1.0 - valued.values[-1]


@pytest.mark.scenario("vineppo/three-steps", clauses=["vineppo/advantages-telescope#1,3"])
def test_three_steps():
    advantages = step_advantages((0.5, 0.5, 0.9), (0, 0, 1))
    assert advantages == pytest.approx((0, 0.4, 0.1))
    assert math.isclose(sum(advantages), 0.5)


@pytest.mark.scenario(clauses=["vineppo/advantages-telescope#2"])
def test_all_tokens_of_a_step_carry_its_advantage():
    assert spread((0.0, 0.4, 0.1), (0, 2, 5, 6)) == (0.0, 0.0, 0.4, 0.4, 0.4, 0.1)


@pytest.mark.scenario("vineppo/two-processes-normalise-together", clauses=["vineppo/advantages-telescope#4"])
def test_two_processes_normalise_together():
    batch = [(0.1, 0.4, -0.3), (0.9,), (0.0, 0.0), (-0.5, 0.2, 0.2, 0.2)]
    masks = [(True,) * len(row) for row in batch]
    whole = normalize(batch, masks, "whiten", alone().sum)
    halves = together(
        2, lambda member: normalize(batch[member.rank :: 2], masks[member.rank :: 2], "whiten", member.sum)
    )
    for index, row in enumerate(whole):
        assert halves[index % 2][index // 2] == pytest.approx(row, abs=1e-5)
    assert sum(whole[1]) != pytest.approx(0)


VOCABULARY = make_vocabulary()
SPLITTERS = (
    Lines(vocabulary=VOCABULARY),
    Sentences(vocabulary=VOCABULARY),
    FixedTokens(num_tokens=5),
    LowProbability(every=2),
    Turns(),
)


@pytest.mark.scenario("vineppo/steps-tile-a-response", clauses=["vineppo/states-are-prefixes-of-token-ids#1,2"])
@settings(max_examples=25)
@given(text=st.text(alphabet="ab Ax.\n$=,7", max_size=120), extra=st.lists(st.integers(0, 255), max_size=4))
@pytest.mark.parametrize("splitter", SPLITTERS, ids=lambda splitter: type(splitter).__name__)
def test_steps_tile_a_response(splitter, text, extra):
    response = (*VOCABULARY.encode(text), *extra, VOCABULARY.stop_id)
    trajectory = Trajectory(
        sample=sample_of(),
        prompt_token_ids=(1, 2),
        token_ids=response,
        rewards=(),
        policy_version=1,
        logprobs=tuple(-(place % 3) / 2 for place in range(len(response))),
        turns=tuple(Turn(start=start, stop=start + 2) for start in range(0, len(response), 4)),
    )
    cuts = splitter.cuts(trajectory)
    steps = [response[start:stop] for start, stop in pairwise(cuts)]
    assert sum(steps, ()) == response
    states = states_of(trajectory, cuts)
    assert [state.prompt_token_ids + state.prefix_token_ids for state in states] == [
        (1, 2, *response[:cut]) for cut in cuts[:-1]
    ]


@pytest.mark.scenario("vineppo/eight-responses-to-one-prompt", clauses=["vineppo/states-are-prefixes-of-token-ids#3"])
def test_eight_responses_to_one_prompt():
    responses = [trajectory_of((0, 0, a, b, 2, 0, STOP)) for a in range(2) for b in range(4)]
    policies = [LockPolicy(), LockPolicy()]
    together(
        2,
        lambda member: values_of(
            responses[member.rank :: 2], policies[member.rank], splitter=PAIRS, company=member, num_continuations=1
        ),
    )
    asked = [wish.state.prefix_token_ids for policy in policies for wave in policy.asked for wish in wave]
    assert (asked.count(()), asked.count((0, 0))) == (1, 1)
    assert len(asked) == 2 + 8 + 8


@pytest.mark.scenario(clauses=["vineppo/states-are-prefixes-of-token-ids#4"])
def test_continuations_come_from_the_version_that_wrote_the_response():
    with pytest.raises(ContinuationOutdated) as caught:
        values_of([trajectory_of(RIGHT, version=1)], LockPolicy(version=2))
    assert (caught.value.code, caught.value.key) == ("continuation-outdated", "x:1")
    assert values_of([trajectory_of(RIGHT, version=2)], LockPolicy(version=2))


@pytest.mark.scenario(clauses=["vineppo/the-search-variant-keeps-a-real-tree#1,2"])
def test_nodes_know_what_they_are_and_a_trajectory_walks_its_own_path():
    right, wrong = trajectory_of(RIGHT), trajectory_of(WRONG)
    tree = Tree(state_at(right, 0), SearchRules())
    path = tree.add(right, PAIRS.cuts(right), owner=(0, 0))
    tree.add(wrong, PAIRS.cuts(wrong), owner=(0, 1))
    assert [node.state for node in path] == list(states_of(right, PAIRS.cuts(right)))
    assert [(node.value, node.visits) for node in path] == [(0.5, 2), (1.0, 1), (1.0, 1), (1.0, 1)]
    assert [node.parent for node in path] == [None, *path[:-1]]
    hopeless = LockPolicy(((0.25,) * 4, (0, 1, 0, 0), *[(0.25,) * 4] * 4))
    budget = SearchBudget(num_rounds=0, num_least=2)
    valuer = TreeValues(SearchRules(), budget, PAIRS)
    valued = valuer.values_of([right, wrong], [PAIRS.cuts(one) for one in (right, wrong)], waves_of(hopeless))
    assert [one.values[0] for one in valued] == [0.0, 0.5]
    assert valued[1].values[1:] == (0.0, 0.0, 0.0)


@pytest.mark.scenario("vineppo/an-update-empties-the-tree", clauses=["vineppo/the-search-variant-keeps-a-real-tree#3"])
def test_an_update_empties_the_tree():
    forest, old = Forest(SearchRules()), trajectory_of(RIGHT, version=4)
    forest.tree_of(old).add(old, PAIRS.cuts(old))
    new = trajectory_of(WRONG, version=5)
    tree = forest.tree_of(new)
    assert (tree.policy_version, tree.root.returns, tree.root.visits) == (5, [], 0)
    with pytest.raises(TreeOutdated) as caught:
        tree.add(old, PAIRS.cuts(old))
    assert (caught.value.code, caught.value.key) == ("tree-outdated", "x:1")
    tree.add(new, PAIRS.cuts(new))
    assert tree.root.value == 0.0
