"""The tree is a tree, the search looks where it pays, and no value bends to the search."""

from dataclasses import replace
from math import exp, log, sqrt

import pytest

from conformance.doubles.ranks import together
from conformance.doubles.refusals import refused
from conformance.doubles.vineppo_locks import STOP, LockPolicy, trajectory_of, waves_of
from rollmatch.environments.trajectory import state_at
from rollmatch.objectives.vineppo.search import SearchBudget, TreeValues
from rollmatch.objectives.vineppo.split import FixedTokens
from rollmatch.objectives.vineppo.tree import SearchRules, Tree

PAIRS = FixedTokens(num_tokens=2)
RIGHT, WRONG, OTHER = (0, 0, 0, 0, 2, 0, STOP), (0, 1, 0, 0, 2, 0, STOP), (0, 0, 1, 1, 2, 0, STOP)


def tree_of(*responses, rules=None):
    made = [trajectory_of(ids) for ids in responses]
    tree = Tree(state_at(made[0], 0), rules or SearchRules())
    paths = [tree.add(one, PAIRS.cuts(one), owner=(0, index)) for index, one in enumerate(made)]
    return tree, paths


def nodes_of(node):
    return [node, *(inner for child in node.children.values() for inner in nodes_of(child))]


@pytest.mark.scenario(clauses=["vineppo/the-search-variant-keeps-a-real-tree#1,2"])
def test_a_node_knows_its_state_value_visits_and_parent():
    tree, (path, *_) = tree_of(RIGHT, WRONG, OTHER)
    assert [node.state.prefix_token_ids for node in path] == [(), (0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 2, 0)]
    assert [node.visits for node in path] == [3, 2, 1, 1]
    assert [[value for _, value in node.returns] for node in path] == [[1.0, 0.0, 1.0], [1.0, 1.0], [1.0], [1.0]]
    assert [node.parent for node in path] == [None, *path[:-1]]
    ends = [node for node in nodes_of(tree.root) if node.state is None]
    assert len(ends) == 3
    assert not any(end.returns for end in ends)


@pytest.mark.scenario(clauses=["vineppo/the-search-variant-keeps-a-real-tree#1,2"])
def test_a_value_leaves_out_the_trajectory_it_judges():
    _, (right, wrong) = tree_of(RIGHT, WRONG)
    assert (right[0].returns_without((0, 0)), wrong[0].returns_without((0, 1))) == ([0.0], [1.0])
    assert right[1].returns_without((0, 0)) == []


@pytest.mark.scenario(clauses=["vineppo/states-are-prefixes-of-token-ids#3"])
def test_a_state_that_is_reached_by_other_steps_has_the_returns_of_all_who_passed():
    """Longer responses, or steps where the policy was unsure, are cut elsewhere."""
    tree = tree_of(RIGHT)[0]
    [*_, apart] = tree.add(trajectory_of(WRONG), (0, 1, 2, 7), owner=(0, 1))
    [_, whole] = tree.add(trajectory_of(WRONG), (0, 2, 7), owner=(0, 2))
    assert apart is not whole
    assert apart.returns == whole.returns == [((0, 1), 0.0), ((0, 2), 0.0)]
    assert apart.returns_without((0, 1)) == [0.0]


@pytest.mark.parametrize("select", ["uct", "puct"])
def test_the_search_prefers_what_paid_and_then_what_is_new(select):
    rules = SearchRules(select=select, exploration=0.1, widening=0.1)
    tree, (right, _) = tree_of(RIGHT, WRONG, rules=rules)
    assert right[1] in tree.select().lineage()
    tree, _ = tree_of(RIGHT, WRONG, *[RIGHT] * 6, rules=replace(rules, exploration=50.0))
    assert tree.select().state.prefix_token_ids[:2] == (0, 1)
    for num_visits, is_wide in ((1, False), (2, True)):
        tree, _ = tree_of(*[RIGHT] * num_visits)
        assert (tree.select() is tree.root) == is_wide, "a node widens with the root of its visits"


@pytest.mark.parametrize("pending", [0, 5])
@pytest.mark.parametrize("select", ["uct", "puct"])
def test_the_search_turns_to_the_rarer_step_at_the_exploration_that_its_formula_says(select, pending):
    paid = replace(trajectory_of(RIGHT, logprobs=(-0.5,) * 7), rewards=((2, 1.0), (7, 2.0)))
    unpaid = replace(trajectory_of(WRONG, logprobs=(-1.0,) * 7), rewards=())
    often, seldom, above = 4 + pending, 2, 6 + pending
    if select == "uct":
        more = sqrt(log(above) / seldom) - sqrt(log(above) / often)
    else:
        odds = exp(-1.0), exp(-2.0)
        likely, unlikely = (each / sum(odds) for each in odds)
        more = sqrt(above) * (unlikely / (1 + seldom) - likely / (1 + often))
    for share, chosen in ((0.99, (0, 0)), (1.01, (0, 1))):
        exploration = share * (1.0 + 8.0 / often) / more
        rules = SearchRules(select=select, exploration=exploration, widening=0.1)
        tree = Tree(state_at(paid, 0), rules)
        first, *_ = [tree.add(one, PAIRS.cuts(one))[1] for one in [paid] * 4 + [unpaid] * 2]
        first.pending = tree.root.pending = pending
        assert tree.select().state.prefix_token_ids[:2] == chosen


@pytest.mark.parametrize(
    ("num_visits", "pending", "is_wide"), [(4, 0, False), (5, 0, True), (15, 1, False), (16, 1, True)]
)
def test_continuations_under_way_count_as_children_and_as_visits(num_visits, pending, is_wide):
    tree, _ = tree_of(*[RIGHT] * num_visits, rules=SearchRules(widening=0.5))
    tree.root.pending = pending
    assert (tree.select() is tree.root) == is_wide


def test_a_tree_takes_its_own_version_only():
    tree, _ = tree_of(RIGHT)
    late = trajectory_of(WRONG, version=2)
    with refused("tree-outdated", "x:1"):
        tree.add(late, PAIRS.cuts(late))
    tree.add(replace(late, policy_version=1), PAIRS.cuts(late))


def searched(policy, trajectories, *, ranks=None, run_seed=1, valuer=None, **budget):
    budget = {"num_rounds": 4, "num_per_round": 8, "num_least": 3} | budget
    valuer = valuer or TreeValues(SearchRules(), SearchBudget(**budget), PAIRS)
    cuts = [PAIRS.cuts(one) for one in trajectories]
    return valuer.values_of(trajectories, cuts, waves_of(policy, ranks, run_seed=run_seed))


@pytest.mark.scenario("vineppo/an-update-empties-the-tree", clauses=["vineppo/the-search-variant-keeps-a-real-tree#3"])
def test_each_window_is_judged_by_trees_of_its_own():
    valuer = TreeValues(SearchRules(), SearchBudget(num_rounds=2, num_per_round=3, num_least=3), PAIRS)
    found = []
    for version in (4, 5, 5):  # the last window is judged again, as after the restart of a server
        policy = LockPolicy(version=version)
        found.append(searched(policy, policy.answer(1, 2), valuer=valuer))
        assert {tree.policy_version for tree in valuer.trees.values()} == {version}
    assert found[0] == found[1] == found[2]


def test_one_rank_grows_a_sample_s_tree_for_all():
    answers = [LockPolicy().answer(*range(1, 5), sample_id=sample_id) for sample_id in (0, 1, 2)]
    flat = [one for part in answers for one in part]
    policies = [LockPolicy(), LockPolicy()]

    def rank(member):
        return searched(policies[member.rank], flat[member.rank :: 2], ranks=member, num_rounds=2)

    halves = together(2, rank)
    assert [len(half) for half in halves] == [6, 6]
    owners = [{request.state.sample_id for wave in policy.requested for request in wave} for policy in policies]
    assert owners == [{0, 2}, {1}] or owners == [{0, 1}, {2}] or owners[0].isdisjoint(owners[1])
    assert len(policies[0].requested) == len(policies[1].requested) == 3


def test_values_have_as_many_returns_as_wished_and_continuations_have_seeds_of_their_own():
    policy = LockPolicy()
    for valued in searched(policy, policy.answer(1, 2), num_rounds=1, num_per_round=2, num_least=4):
        assert min(valued.counts) >= 4
    assert len(policy.requested) == 2
    policy = LockPolicy()
    searched(policy, policy.answer(1, 2), num_rounds=5, num_per_round=6)
    requests = [request for wave in policy.requested for request in wave]
    assert len({(request.state, request.seed) for request in requests}) == len(requests)
